"""What esper can be given from outside: a host, a blueprint, a data set, a reward term and a controller."""
