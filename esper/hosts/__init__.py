"""Networks that can host seeds."""

from esper.hosts.cnn import CNNHost
from esper.hosts.gpt import GPTHost
from esper.hosts.host import Dropout, Host, Slot, parameter_count

__all__ = ["CNNHost", "Dropout", "GPTHost", "Host", "Slot", "parameter_count"]
