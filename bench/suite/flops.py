"""Useful floating-point operations of a step, whoever takes it: what the mathematics asks for, and nothing that a program
adds to it.

Counted: products of the linear layers over informative tokens, attention over the tokens that each one really sees, and the
head on the rows whose next token is scored; a multiply-add is two. What comes after the last layer's attention is needed of
the scored rows alone, and counted for them alone. Backward is twice forward; where a matrix is frozen it
is once (the input's gradient), and the adapter's own products are added. A reference in the step is one more forward.
Not counted: padding, the second copy of a shared prompt, anything computed twice, norms, activations, the optimiser.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Llama:
    """A Llama model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int

    @classmethod
    def of(cls, facts: dict) -> "Llama":
        return cls(facts["hidden_size"], facts["num_hidden_layers"], facts["num_attention_heads"],
                   facts["num_key_value_heads"], facts["intermediate_size"], facts["vocab_size"])

    @property
    def kv_width(self) -> int:
        return self.hidden // self.heads * self.kv_heads

    def before(self) -> list[tuple[int, int]]:
        """Inputs and outputs of the matrices of one layer that come before its attention."""
        return [(self.hidden, self.hidden), (self.hidden, self.kv_width), (self.hidden, self.kv_width)]

    def after(self) -> list[tuple[int, int]]:
        """Inputs and outputs of the matrices that come after it."""
        h, i = self.hidden, self.intermediate
        return [(h, h), (h, i), (h, i), (i, h)]

    def products(self) -> list[tuple[int, int]]:
        """Inputs and outputs with matrices of one input joined, as programs compute them."""
        h, kv, i = self.hidden, self.kv_width, self.intermediate
        return [(h, h + 2 * kv), (h, h), (h, 2 * i), (i, h)]


@dataclass(frozen=True)
class Load:
    """Load of a step."""

    tokens: int  # informative ones: no padding, what two answers share counted once
    seen: int  # over these, how many tokens each sees, itself included
    scored: int  # rows of the head
    sequences: int

    def __add__(self, other: "Load") -> "Load":
        return Load(self.tokens + other.tokens, self.seen + other.seen, self.scored + other.scored,
                    self.sequences + other.sequences)


def load_of_pair(prompt: list, chosen: list, rejected: list) -> Load:
    """Load of two completions, each with its EOS token; their common beginning is shared like the prompt."""
    first, second = prompt + chosen, prompt + rejected
    shared = next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))
    tails = (len(first) - shared, len(second) - shared)
    seen = sum(range(1, shared + 1)) + sum(sum(range(shared + 1, shared + tail + 1)) for tail in tails)
    # Rows that predict: from the last of the prompt to the one before each answer's last; shared ones are one row.
    scored = shared - len(prompt) + any(tails) + sum(max(tail - 1, 0) for tail in tails)
    return Load(shared + sum(tails), seen, scored, 2)


def load_of_row(prompt: list, answer: list) -> Load:
    """Load of a demonstration."""
    length = len(prompt) + len(answer)
    return Load(length, length * (length + 1) // 2, len(answer), 1)


def useful(llama: Llama, load: Load, adapter: str, reference: str, rank: int = 16) -> float:
    """Operations of a step."""
    def over_rows(of_matrix) -> int:
        """The sum over all matrices, for every row that goes through each."""
        before, after = (sum(of_matrix(*shape) for shape in shapes) for shapes in (llama.before(), llama.after()))
        return llama.layers * before * load.tokens + after * ((llama.layers - 1) * load.tokens + load.scored)

    linear = 2.0 * over_rows(lambda inputs, outputs: inputs * outputs)
    low_rank = 2.0 * over_rows(lambda inputs, outputs: rank * (inputs + outputs))
    attention = attention_forward(llama, load)
    head = 2.0 * load.scored * llama.hidden * llama.vocab
    forward = linear + attention + head
    if adapter == "full":
        step = 3 * forward
    else:
        step = 2 * (linear + head) + 3 * (attention + low_rank)
    return step + (forward if reference in ("model", "base") else 0.0)


def attention_forward(llama: Llama, load: Load) -> float:
    """Queries by keys, and probabilities by values."""
    return 4.0 * load.seen * llama.hidden * llama.layers
