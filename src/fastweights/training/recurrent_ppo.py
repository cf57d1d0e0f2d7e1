"""The former place of `fastweights.integrations.sb3`, for one release."""

from fastweights.integrations.sb3 import RecurrentPolicy as RecurrentPolicy
