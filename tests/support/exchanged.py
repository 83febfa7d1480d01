"""A checkpoint that is read with two tensors in each other's place."""

from dataclasses import replace


def exchange(read, one, other):
    """Return `HFCheckpoint`'s method `read` with the names of tensors exchanged, in which `one` or `other` occurs."""

    def read_other(checkpoint, region, *args):
        name = region.tensor.name.replace(one, "*").replace(other, one).replace("*", other)
        return read(checkpoint, region._replace(tensor=replace(region.tensor, name=name)), *args)

    return read_other
