"""Hosts: networks with slots for seeds."""

from esper.hosts.cnn import CNNHost
from esper.hosts.gpt import GPTHost
from esper.hosts.host import Dropout, Host, Slot, count_parameters
from esper.hosts.variants import VARIANTS, parse_variant, variant_arguments

__all__ = [
    "VARIANTS",
    "CNNHost",
    "Dropout",
    "GPTHost",
    "Host",
    "Slot",
    "count_parameters",
    "parse_variant",
    "variant_arguments",
]
