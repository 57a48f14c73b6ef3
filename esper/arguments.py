"""Types of arguments that have a range; a configuration is checked against them before anything is built."""

from typing import Annotated

from annotated_types import Ge, Le, MinLen

Count = Annotated[int, Ge(1)]
LayerCount = Annotated[int, Ge(1), Le(1000)]  # more would be built for hours
Name = Annotated[str, MinLen(1)]
