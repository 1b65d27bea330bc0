"""The roles of placeholders and outputs: what they stand for in the user's model."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class InputRole(enum.Enum):
    PARAMETER = "parameter"  # name: FQN
    BUFFER = "buffer"  # name: FQN
    INPUT = "input"  # name: path in (args, kwargs), such as "tokens" or "batch.labels"
    TANGENT = "tangent"  # name: path of the output
    COORDINATE = "coordinate"  # name: axis; this rank's place on it, i64[1]
    SEED = "seed"  # name: "step"; i64[], equal on all ranks, new at every call
    SAVED = "saved"  # name: the forward's node; what a partitioned backward is given of it


class OutputRole(enum.Enum):
    OUTPUT = "output"  # name: path in the model's output, such as "loss" or "0"
    BUFFER = "buffer"  # name: FQN; the buffer's new value
    GRADIENT = "gradient"  # name: FQN of the parameter (or "input:<path>" of an input)
    SAVED = "saved"  # name: of the node; what a partitioned forward keeps for the backward


@dataclass(frozen=True)
class Input:
    """The parameter, buffer, input or tangent that a placeholder stands for."""

    role: InputRole
    name: str


@dataclass(frozen=True)
class Output:
    """The output, gradient or mutation that one element of the graph's output stands for."""

    role: OutputRole
    name: str

    @property
    def partner(self) -> Input:
        """Return the input that it corresponds to: of a gradient, what it is the gradient of; of an output, its tangent.

        A parameter and an input may have the same name.
        """
        if self.role is not OutputRole.GRADIENT:
            return Input(_PARTNERS[self.role], self.name)
        path = self.name.removeprefix("input:")
        return Input(InputRole.PARAMETER if path == self.name else InputRole.INPUT, path)


_PARTNERS = {
    OutputRole.OUTPUT: InputRole.TANGENT,
    OutputRole.BUFFER: InputRole.BUFFER,
    OutputRole.SAVED: InputRole.SAVED,
}
