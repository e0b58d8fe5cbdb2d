"""What RULER's needle tasks and its frequent words say to a model; and the same tasks in words that RULER does not use.

A cache that is tuned on a benchmark may have learnt how that benchmark asks. The suite `reworded` asks for the same
things otherwise; nothing in this library was chosen on it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wording:
    """Templates of a task.

    Attributes:
        suite: that the task is named after.
        context: what stands around `{context}`, before the question.
        question: the rest of the user's turn.
        answer_prefix: how the answer begins.
        needle: the sentence that is hidden, with `{key}` and `{value}`; empty where nothing is. In all templates of
            needles `{kind}` is what is asked for. They are written for several answers; see `for_number`.
    """

    suite: str
    context: str
    question: str
    answer_prefix: str
    needle: str = ""

    def for_number(self, answers: int) -> Wording:
        """The wording in the singular if there is one answer (RULER's own replacements); needles stay as they are."""
        if answers > 1:
            return self
        context, question, answer_prefix = map(_singular, (self.context, self.question, self.answer_prefix))
        return Wording(self.suite, context, question, answer_prefix, self.needle)


def _singular(text: str) -> str:
    return text.replace("Some", "A").replace("are all", "is").replace("are", "is")


NEEDLES = Wording(
    suite="ruler",
    context=(
        "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the {kind} afterwards.\n{context}\n"
    ),
    question="What are all the special magic {kind} for {query} mentioned in the provided text?",
    answer_prefix=" The special magic {kind} for {query} mentioned in the provided text are",
    needle="One of the special magic {kind} for {key} is: {value}.",
)
NEEDLES_REWORDED = Wording(
    suite="reworded",
    context=(
        "You get a long document to study. It tells the locker {kind} of one name or of several names."
        "\n\n{context}\n\nThat was the end of the document.\n"
    ),
    question="Which locker {kind} did the document give for {query}?",
    answer_prefix=" According to the document, the locker {kind} of {query} are",
    needle="Note that the locker {kind} of {key} include {value}.",
)
FREQUENT_WORDS = Wording(
    suite="ruler",
    context=(
        "Read the following coded text and track the frequency of each coded word. "
        "Find the three most frequently appeared coded words. {context}\n"
    ),
    question=(
        "Question: Do not provide any explanation. Please ignore the dots '....'. "
        "What are the three most frequently appeared words in the above coded text?"
    ),
    answer_prefix=" Answer: According to the coded text above, the three most frequently appeared words are:",
)
FREQUENT_WORDS_REWORDED = Wording(
    suite="reworded",
    context="A list of made-up words and dots, most of them several times:\n\n{context}\n\nThat was all.\n",
    question="Leave out the dots. Tell me nothing but the three made-up words that came most often.",
    answer_prefix=" The three made-up words that came most often are:",
)
