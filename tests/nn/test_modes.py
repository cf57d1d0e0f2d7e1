"""Evaluation mode for the time of a block, also in several threads."""

import threading

import pytest
import torch

from fastweights.nn.modes import evaluating


def modes(model):
    return [part.training for part in model.modules()]


@pytest.fixture
def model():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(), torch.nn.BatchNorm1d(2))
    model[2].eval()  # frozen by its owner
    return model


def test_every_part_has_its_mode_again_also_after_an_error(model):
    before = modes(model)
    with evaluating(model):
        assert not any(modes(model))
    assert modes(model) == before
    with pytest.raises(ZeroDivisionError), evaluating(model):
        raise ZeroDivisionError
    assert modes(model) == before == [True, True, True, False]


def test_the_last_of_two_blocks_restores_whichever_it_is(model):
    before = modes(model)
    first, second = evaluating(model), evaluating(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not any(modes(model))
    second.__exit__(None, None, None)
    assert modes(model) == before


def test_a_block_of_a_part_inside_one_of_the_whole(model):
    before = modes(model)
    with evaluating(model[1]):
        with evaluating(model):
            assert not any(modes(model))
        assert modes(model) == [True, True, False, False]
    assert modes(model) == before


def test_threads_never_see_another_mode_inside_and_leave_none_behind(model):
    before, wrong = modes(model), []
    barrier = threading.Barrier(4)

    def enter_again_and_again():
        barrier.wait()
        for _ in range(2000):
            with evaluating(model):
                if any(modes(model)):
                    wrong.append(modes(model))

    threads = [threading.Thread(target=enter_again_and_again) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert modes(model) == before
