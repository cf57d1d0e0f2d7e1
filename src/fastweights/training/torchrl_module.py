"""The former place of `fastweights.integrations.torchrl`, for one release."""

from fastweights.integrations.torchrl import RecurrentModule as RecurrentModule
