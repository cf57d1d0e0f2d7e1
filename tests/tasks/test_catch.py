import gymnasium
import numpy
import pytest
from gymnasium.utils.env_checker import check_env

from fastweights.tasks import catch
from fastweights.tasks.catch import CatchGames
from fastweights.tasks.catch_environments import ENVIRONMENT, CatchEnv, CatchVectorEnv


def play(ball, actions, size, visible):
    """One game in plain Python: the observations, as sets of pixels, and the rewards."""
    paddle, observations, rewards = size // 2 - 1, [], []
    for row in range(size):
        pixels = {(row, ball), (size - 1, paddle), (size - 1, paddle + 1)}
        observations.append(pixels if row < visible else set())
        if row == size - 1:
            break
        paddle = min(max(paddle + (-1, 0, 1)[actions[row]], 0), size - 2)
        rewards.append(0 if row < size - 2 else 1 if ball in (paddle, paddle + 1) else -1)
    return observations, rewards


@pytest.mark.parametrize(("size", "visible"), [(16, 3), (24, 5), (2, 1), (5, 5)])
def test_the_games_are_those_of_a_plain_loop(size, visible):
    generator = numpy.random.default_rng(size)
    balls, actions = generator.integers(size, size=40), generator.integers(3, size=(size - 1, 40))
    games = CatchGames(40, size=size, visible=visible)
    games.start(balls)
    observations, rewards = [games.observe()], []
    for chosen in actions:
        rewards.append(games.move(chosen))
        observations.append(games.observe())
    assert games.ended
    for game in range(40):
        pixels, expected = play(int(balls[game]), actions[:, game].tolist(), size, visible)
        assert [set(map(tuple, numpy.argwhere(seen[game]).tolist())) for seen in observations] == pixels
        assert [float(reward[game]) for reward in rewards] == expected


@pytest.mark.parametrize("size", [16, 24])
def test_a_player_that_remembers_catches_every_ball_and_one_that_sees_nothing_has_the_floor(size):
    returns = {}
    for name in ("remembers", "stays"):
        games = CatchGames(size, size=size, visible=1)
        games.start(numpy.arange(size))
        while not games.ended:
            toward = numpy.sign(games.balls - games.paddles) + 1
            rewards = games.move(toward if name == "remembers" else numpy.ones(size, dtype=int))
        returns[name] = rewards.mean()
    assert returns["remembers"] == 1
    assert returns["stays"] == pytest.approx(catch.floor(size))


def test_balls_fall_from_every_column_as_often():
    games = CatchGames(16_000, size=16)
    games.draw(numpy.random.default_rng(0))
    counts = numpy.bincount(games.balls, minlength=16)
    assert abs(counts - 1000).max() < 4 * 1000**0.5


def test_gymnasium_finds_it_and_its_checker_has_nothing_to_say():
    environment = gymnasium.make(ENVIRONMENT, size=8, visible=2, render_mode="rgb_array")
    assert isinstance(environment.unwrapped, CatchEnv)
    check_env(environment.unwrapped)
    named = gymnasium.make("fastweights.tasks.catch_environments:fastweights/Catch-v0")
    assert named.observation_space.shape == (16, 16)


def test_it_is_rendered_as_an_image_that_is_darker_where_nothing_is_seen():
    environment = CatchEnv(16, 1, "rgb_array")
    observation, _ = environment.reset(seed=3)
    image = environment.render()
    assert image is not None
    assert image.shape == (256, 256, 3)
    assert image.dtype == numpy.uint8
    assert (image[8::16, 8::16, 0] > 128).tolist() == (observation > 0).tolist()
    assert not environment.step(numpy.int64(1))[0].any()
    later = environment.render()
    assert later is not None
    assert set(numpy.unique(later)) == {64, 160}
    assert CatchEnv().render() is None


def test_many_games_at_once_are_single_ones_side_by_side():
    environments = gymnasium.make_vec(ENVIRONMENT, num_envs=3, size=5, visible=2)
    assert isinstance(environments.unwrapped, CatchVectorEnv)
    observations, _ = environments.reset(seed=7)
    again, _ = environments.reset(seed=7)
    assert (observations == again).all()
    assert environments.observation_space.contains(observations)
    balls = observations[:, 0].argmax(1)
    generator = numpy.random.default_rng(0)
    actions = generator.integers(3, size=(4, 3))
    for step, chosen in enumerate(actions):
        observations, rewards, terminated, truncated, info = environments.step(chosen)
        assert terminated.tolist() == [step == 3] * 3
        assert not truncated.any()
    for game in range(3):
        assert rewards[game] == play(int(balls[game]), actions[:, game].tolist(), 5, 2)[1][-1]
    assert not info["final_obs"].any()  # blank, as the last frames are
    assert info["_final_obs"].all()
    assert observations[:, 0].sum() == 3  # the next games have begun


def test_a_seed_draws_the_games_and_none_draws_the_next_ones():
    environments = gymnasium.make_vec(ENVIRONMENT, num_envs=20, size=16, visible=2)
    first, other, again, following = (environments.reset(seed=seed)[0] for seed in (1, 2, 1, None))
    assert (first == again).all()
    assert not (first == other).all()
    assert not (again == following).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 1}, "size must be an integer of at least 2, got 1"),
        ({"size": 5, "visible": 6}, r"visible must be a number of frames from 1 to 5 \(size\), got 6"),
        ({"visible": 0}, r"visible must be a number of frames from 1 to 16 \(size\), got 0"),
        ({"render_mode": "human"}, "render_mode must be rgb_array or None, got 'human'"),
    ],
)
def test_games_that_there_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        CatchEnv(**arguments)
    with pytest.raises(ValueError, match=message):
        CatchVectorEnv(2, **arguments)
    with pytest.raises(ValueError, match="count must be an integer of at least 1, got 0"):
        CatchVectorEnv(0)


@pytest.mark.parametrize("actions", [[0, 3], [-1, 1], [1], 1, [1.0, 1.5], [True, True]])
def test_what_is_no_action_moves_nothing(actions):
    games = CatchVectorEnv(2, 5, 2)
    games.reset(seed=1)
    before = games.games.screens()
    with pytest.raises(ValueError, match="actions must be 2 integers, 0 left, 1 stay or 2 right, got"):
        games.step(actions)
    assert (games.games.screens() == before).all()
    with pytest.raises(TypeError, match=r"seed must be one integer, .* or None, got \[1, 2\]"):
        games.reset(seed=[1, 2])


def test_a_game_that_has_ended_is_not_played_on():
    game = CatchEnv(3, 1)
    game.reset(seed=1)
    stay = numpy.int64(1)
    assert [game.step(stay)[2] for _ in range(2)] == [False, True]
    with pytest.raises(ValueError, match=r"the games have ended after 3 frames \(size\): begin new ones"):
        game.step(stay)
