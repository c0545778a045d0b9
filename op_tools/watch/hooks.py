"""What the interceptor asks of a tool, with the answers of a tool that does nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ..call.description import Tensor
from ..call.traits import OpTraits
from ..view.console import View

if TYPE_CHECKING:
    from .compiled import CompiledRun
    from .intercept import Call


class Hooks:
    """What happens around each call; `op_tools.tools.base.Tool` has these hooks, and tools override them."""

    name: ClassVar[str] = "Tool"
    order: ClassVar[int] = 50  # lower ones see the call first and the result last
    transforms: ClassVar[bool] = False  # replaces how the operator runs, instead of watching it
    wants_backward: bool = False
    wants_backward_start: bool = False
    wants_gradients: bool = True  # `after_backward` looks at the gradients; where no tool does, its lists are empty
    wants_twins_joined: ClassVar[bool] = False  # arguments that share memory get the sum of their gradients
    wants_sums: bool = False  # also gets the additions that autograd makes itself, as calls
    wants_classes: ClassVar[bool] = False  # hears of every `torch.autograd.Function` whose kernel no operator shows
    wants_pointers: ClassVar[bool] = True  # looks at the addresses of tensors; with a full console all do
    hears_roots: bool = False  # gets `before_backward_pass`; a tool may change its mind while it runs
    hears_passes: bool = False  # gets `after_backward_passes`; a tool may change its mind while it runs
    looks_inside: ClassVar[bool] = False  # of a call on wrapper tensors, sees the calls on plain tensors inside it
    compares_compiled: ClassVar[bool] = False  # compiled code is compared as a whole, or it says by itself what is not
    view: View

    @property
    def hook(self) -> str:
        """The tool's name in apply and skip lines."""
        return f"{self.name}Hook"

    @property
    def gated(self) -> bool:
        """Whether each call must be asked about, besides its operator."""
        return False

    @property
    def names_skips(self) -> bool:
        """Whether operators that are left alone are named on the console."""
        return False

    def wants(self, traits: OpTraits) -> bool:
        """Whether the tool works on an operator at all; asked once per function."""
        return True

    def wants_inside(self, traits: OpTraits) -> bool:
        """Whether the tool works on an operator inside a call on wrapper tensors that it works on."""
        return True

    def light(self, traits: OpTraits) -> tuple[Any, ...] | None:
        """What `native.front` needs to watch an operator without `before` and `after`; None where these are called."""
        return None

    def accepts(self, call: Call) -> bool:
        """Whether the tool works on this very call; asked only of gated tools."""
        return True

    def skipped(self, op: str) -> None:
        """An operator was left alone, and the console names it."""
        self.view.skip(self.hook, op)

    def before(self, call: Call) -> None:
        """The operator is about to run."""

    def transform(self, call: Call, run: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        """Run the operator in another way."""
        return run(call.args, call.kwargs)

    def after(self, call: Call) -> None:
        """The operator has run; `call.result` is what it returned."""

    def looked_inside(self, call: Call, found: bool) -> None:
        """A call on wrapper tensors has run; whether calls on plain tensors were seen inside it."""

    def judges_class(self, kind: type) -> bool:
        """Whether a `torch.autograd.Function` is watched as one operator; what it calls inside is not, then."""
        return False

    def unseen(self, traits: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A `torch.autograd.Function` has returned what no operator made."""

    def before_node(self, call: Call, node: int) -> Any:
        """A backward node of the call is about to run; `after_node` gets what this returns."""

    def after_node(self, call: Call, started: Any) -> None:
        """A backward node of the call has run; not called where `before_node` returned None."""

    def after_backward(self, call: Call, grad_outputs: list[Tensor | None], grad_inputs: list[Tensor | None]) -> None:
        """The backward pass of the call is complete."""

    def computed_again(self, first: Call, again: Call, reused: bool, doubt: str) -> None:
        """Checkpointing has made a call again: the backward of the first works with what the second has.

        `reused`: the result is the first one's, or is not known; `after` does not follow where there is none.
        `doubt` says why the second may differ from what its arguments give; empty where it may not.
        """

    def doubts_gradients(self, call: Call, reason: str) -> None:
        """The backward of a call may work with other tensors than the call had."""

    def before_backward_pass(self, roots: Sequence[Tensor]) -> None:
        """A backward pass is about to begin at these tensors; for tools that set `hears_roots`."""

    def after_backward_passes(self, graph_is_kept: bool) -> None:
        """Backward passes have ended and none is under way, whichever calls they were of."""

    def before_compiled_code(self, run: CompiledRun) -> None:
        """A function that `torch.compile` made is about to run, unseen."""

    def after_compiled_code(self, run: CompiledRun | None) -> None:
        """Compiled code has run, unseen: it may have written to any tensor, and not counted that.

        `run` is None in a backward pass, and where a tool started while the code ran.
        """

    def failed(self, call: Call, error: BaseException, what: str = "the tool failed on this operator") -> None:
        """The tool raised an error; the training goes on."""

    def make_room(self, call: Call) -> bool:
        """The device has no memory for this call: give back what the tool holds there; whether it held anything."""
        return False
