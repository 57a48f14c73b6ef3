"""A plugin for esper: a host, a blueprint, a data set, a reward term and a controller."""
