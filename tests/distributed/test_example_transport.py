"""A user's own transport carries weights into an engine's process, which finds the transport by its name."""

from support import fake_engine
from support.processes import World


def test_the_tcp_example_syncs_a_live_engine(tmp_path):
    with World(1, tmp_path / "world") as world:
        world.call(fake_engine.start, tmp_path, 2, {"transport": "examples.plugs.tcp:TRANSPORT"}, 10.0, seconds=900.0)
        first = world.call(fake_engine.answers, 4, 20)[0]
        world.call(fake_engine.change, 2)
        (report,) = world.call(fake_engine.sync_through, 2, {})
        assert (report["proved"], report["restarts"]) == (report["tensors"], 0)
        second = world.call(fake_engine.answers, 4, 20)[0]
        assert {version for _, version in second} == {2} and [tokens for tokens, _ in first] != [tokens for tokens, _ in second]
