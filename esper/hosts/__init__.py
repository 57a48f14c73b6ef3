"""Hosts: networks with slots for seeds."""

from esper.hosts.cnn import CNNHost
from esper.hosts.gpt import GPTHost
from esper.hosts.host import Dropout, Host, Slot, count_parameters

__all__ = [
    "CNNHost",
    "Dropout",
    "GPTHost",
    "Host",
    "Slot",
    "count_parameters",
]
