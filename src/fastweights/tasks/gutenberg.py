"""The former place of `fastweights.tasks.text.gutenberg`, for one release."""

from fastweights.tasks.text.gutenberg import PAPER_TEST as PAPER_TEST
from fastweights.tasks.text.gutenberg import PAPER_VALIDATION as PAPER_VALIDATION
from fastweights.tasks.text.gutenberg import Splits as Splits
from fastweights.tasks.text.gutenberg import load as load
from fastweights.tasks.text.gutenberg import read_books as read_books
