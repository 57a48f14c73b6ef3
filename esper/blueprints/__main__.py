"""python -m esper.blueprints: list all blueprints with their parameter counts."""

from esper.blueprints import format_blueprints, topologies

CHANNELS = {"cnn": (8, 16, 32, 64), "transformer": (64, 128, 384)}

if __name__ == "__main__":
    print("\n\n".join(format_blueprints(topology, CHANNELS[topology]) for topology in topologies()))
