"""What breaks between nodes, each while the run samples, syncs, and writes a checkpoint (docs/guides/faults.md has the table).

A run that goes on ends with the bits of an undisturbed one. A run that ends says so in one line within the seconds that are promised, and
leaves no process and no file on any node. Started again, it ends with the bits of an undisturbed one.
"""

import pytest
from support.node_faults import ENDING, ONE_ENGINE, SURVIVED, FaultyJob
from support.node_runs import check, run_on_one_node, wait_for_phase
from support.nodes import make_clocks

pytestmark = [pytest.mark.long, pytest.mark.timeout(6000)]
PHASES = ("generate", "sync", "checkpoint")


@pytest.fixture
def nodes(cluster, tmp_path):
    make_clocks(tmp_path)
    return cluster(2, mirrored=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the folder of a run of so many steps on this machine."""
    folders = {}

    def run(steps):
        if steps not in folders:
            folders[steps] = run_on_one_node(tmp_path_factory.mktemp("undisturbed"), ONE_ENGINE | {"train.steps": steps})
        return folders[steps]

    return run


def test_a_run_goes_on_after_faults_with_the_bits_of_an_undisturbed_one(nodes, undisturbed, tmp_path):
    steps, step = 2 * len(SURVIVED) * len(PHASES), 0  # on a busy machine, a test may miss a phase
    job = FaultyJob(nodes, tmp_path / "two", {"train.steps": steps})
    for name in SURVIVED:
        for phase in PHASES:
            step = wait_for_phase(job.commands, job.folder, phase, step)
            SURVIVED[name].strike(nodes)
            print(f"step {step}, {phase}: {name}")
    check(nodes, job.commands, job.folder, undisturbed(steps))


@pytest.mark.parametrize("first", range(len(PHASES)))
def test_a_run_that_faults_end_leaves_nothing_and_resumes_with_the_bits_of_an_undisturbed_one(first, nodes, undisturbed, tmp_path):
    steps, step = 3 * len(ENDING), 0
    job = FaultyJob(nodes, tmp_path / "two", {"train.steps": steps})
    for number, name in enumerate(ENDING, first):
        step = wait_for_phase(job.commands, job.folder, phase := PHASES[number % len(PHASES)], step)
        ENDING[name].strike(nodes)
        print(f"step {step}, {phase}: {name}, ended after {job.break_down(ENDING[name]):.0f} s")
        job.start()
    check(nodes, job.commands, job.folder, undisturbed(steps))
