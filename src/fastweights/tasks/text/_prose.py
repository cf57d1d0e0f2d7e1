"""Sentences and words of prose by NLTK, in lower case, as Rae et al. 2018 (appendix A.5) prepare books and news.

What the paper leaves to NLTK, or leaves open:

- Where a sentence ends is punkt's to say, and NLTK's English model of it is a download of its own. The numbers of a
  corpus should not hang on whether somebody has it: here punkt learns, as it was made to (Kiss and Strunk 2006), which
  words are abbreviations from a sample of the training text itself.
- Curly quotes and apostrophes become straight ones. NLTK has rules for `don't` with a straight one alone, and the
  paper's books of 2018 are mostly ASCII: one word would have two spellings.
- Underscores around words in italics and the like stay, as in the paper's script.
"""

import importlib.metadata
from collections.abc import Iterable

from fastweights.errors import DataError

_STRAIGHT = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"'})
_SAMPLE = 2**21  # characters that punkt learns from, at most; 10 million take a minute


class Prose:
    """Finds sentences and words, once it has seen a sample of the text."""

    def __init__(self, sample: Iterable[str]) -> None:
        from nltk.tokenize import NLTKWordTokenizer
        from nltk.tokenize.punkt import PunktSentenceTokenizer, PunktTrainer

        trainer = PunktTrainer()
        left = _SAMPLE
        for text in sample:
            trainer.train(_straighten(text[:left]), finalize=False)
            left -= len(text)
            if left <= 0:
                break
        self._sentences = PunktSentenceTokenizer(trainer.get_params())
        self._words = NLTKWordTokenizer()

    def tokenize(self, text: str) -> str:
        """Return a text in lower case, a sentence a line, with a space between tokens."""
        sentences = self._sentences.tokenize(_straighten(text))
        return "".join(f"{' '.join(self._words.tokenize(sentence))}\n".lower() for sentence in sentences)


def find_nltk() -> str:
    """Return the version of NLTK, which the tokens depend on; NLTK itself takes a second to import.

    Raises:
        DataError: it is not installed.
    """
    try:
        return importlib.metadata.version("nltk")
    except importlib.metadata.PackageNotFoundError:
        raise DataError(
            "sentences and words are found by NLTK, which is not installed: `pip install '.[text]'` in the checkout"
        ) from None


def _straighten(text: str) -> str:
    return text.translate(_STRAIGHT).replace("\r", " ").replace("\n", " ")
