import torch
from hypothesis import settings

torch.set_num_threads(1)  # the workers of the test run share the cores

settings.register_profile("esper", deadline=None, max_examples=20, derandomize=True)
settings.load_profile("esper")
