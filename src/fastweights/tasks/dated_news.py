"""The former place of `fastweights.tasks.text.dated_news`, for one release."""

from fastweights.tasks.text.dated_news import GIGAWORD_SPLITS as GIGAWORD_SPLITS
from fastweights.tasks.text.dated_news import REUTERS_SPLITS as REUTERS_SPLITS
from fastweights.tasks.text.dated_news import Article as Article
from fastweights.tasks.text.dated_news import load_gigaword as load_gigaword
from fastweights.tasks.text.dated_news import load_reuters as load_reuters
from fastweights.tasks.text.dated_news import read_reuters as read_reuters
