"""Types of arguments that have a range; a configuration is checked against them before anything is built."""

from typing import Annotated

from annotated_types import Ge, MinLen

Count = Annotated[int, Ge(1)]
Name = Annotated[str, MinLen(1)]
