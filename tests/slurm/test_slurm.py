"""launch/slurm with a real SLURM of five nodes, which are namespaces of this machine. Debian's packages are unpacked, not installed."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from slurm_cluster import PACKAGES, PROGRAM, Cluster
from support.debian import NoPackageError, unpack_packages
from support.node_runs import compare_rows
from support.nodes import Cluster as Nodes
from support.processes import ROOT, command_lines, until
from support.train_command import TINY, TORCHRUN, finish, latest, make_model, read_rows, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = [pytest.mark.long, pytest.mark.timeout(4000)]
COLOCATED, DISAGGREGATED = (ROOT / "launch" / "slurm" / f"{kind}.sbatch" for kind in ("colocated", "disaggregated"))
EACH_NODE = ("--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1", "--time=60", "--oversubscribe")
CHANGES = {
    "train.layout.tp": 2,
    "train.steps": 20,
    "checkpoint.every": 1,
    "reward.function": "support.agent_programs:judge",
}  # ten seconds or more: the signal comes in the middle
FOUR_ENGINES = ("--model.path=model", "--rollout.engines=4")
LAST_TWO = 3
PHASES = {"generate", "logprobs", "train", "sync", "proof", "eval", "checkpoint", "step"}
STAND_IN = """#!/usr/bin/env bash
# Stands in for the trainer's Python: notes how it was started, then ends as the file `codes` says, a line for each start; with `stop` it
# waits for a signal and ends as the trainer does; with `engines` rank 0 starts and ends them.
echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $*" >>"$PWD/started.$RANK"
code=$(sed -n "$(wc -l <"$PWD/started.$RANK")p" codes)
echo "rank $RANK was here"
if [ "$code" = engines ]; then
  code=0
  if [ "$RANK" = 0 ]; then "$REAL_PYTHON" -m support.slurm_trainer "$@" || code=$?; touch ended; fi
  until [ -e ended ]; do sleep 0.2; done
fi
[ "$code" != stop ] || { trap 'exit 143' USR1 TERM; while :; do sleep 0.1; done; }
exit "$code"
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    with ExitStack() as stack:
        try:
            root = unpack_packages(folder, *PACKAGES, program=PROGRAM)
            nodes = stack.enter_context(Nodes(5, tmp_path_factory.getbasetemp()))  # which has the folders of all tests
        except (NoPackageError, OSError) as error:
            pytest.skip(f"no SLURM: {error}")
        yield stack.enter_context(Cluster(root, folder / "cluster", nodes))


@pytest.fixture(scope="module", autouse=True)
def quickstarts(cluster, tmp_path_factory):
    """The quickstart in both placements, one after the other, while the tests with stand-ins run."""
    with ThreadPoolExecutor(1) as pool:
        runs = {"colocated": stopped_and_started_again, "disaggregated": with_an_engine_elsewhere}
        yield {name: pool.submit(run, cluster, tmp_path_factory.mktemp(name)) for name, run in runs.items()}
        pool.shutdown(cancel_futures=True)


class Job:
    """A script submitted for the first nodes of the cluster, with all its files in `folder`."""

    def __init__(self, cluster, folder, *arguments, script=COLOCATED, nodes=2, first=0, options=(), **variables):
        self.cluster, self.folder = cluster, folder
        environment = {"MEGATRON_RL_ROOT": str(ROOT), "PYTHONPATH": f"{ROOT}:{ROOT}/tests", "PYTHON": sys.executable}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **variables}
        placement = (f"--nodes={nodes}", f"--nodelist=node[{first}-{first + nodes - 1}]", f"--chdir={folder}")
        self.id = cluster.run("sbatch", "--parsable", *placement, *EACH_NODE, *options, script, *arguments, env=environment)

    def state(self):
        return self.cluster.job(self.id)

    def wait(self, seconds):
        """Return the state and exit code that the job ends with."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        until(lambda: self.state()["JobState"] in ends, seconds, f"the end of the job\n{self.texts()}")
        return f"{self.state()['JobState']} {self.state()['ExitCode'].partition(':')[0]}"

    def printed(self):
        return (self.folder / f"slurm-{self.id}.out").read_text()

    def rank(self, number):
        return self.folder / "runs" / "slurm" / self.id / f"rank_0000{number}.log"

    def texts(self):
        files = [*self.folder.glob("slurm-*.out"), *self.folder.glob("runs/slurm/*/rank_*.log")]
        return "\n".join(f"--- {file}\n{file.read_text(errors='replace')[-3000:]}" for file in files)


@pytest.fixture
def stand_in(cluster, tmp_path):
    """`stand_in(*codes)` submits a job whose ranks are stand-ins that end with these exit codes, one for each start."""
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    (tmp_path / "run.toml").write_text("")

    def submit(*codes, arguments=("--train.steps=3",), **named):
        (tmp_path / "codes").write_text("\n".join(map(str, codes)) + "\n")
        return Job(cluster, tmp_path, "run.toml", *arguments, PYTHON=str(python), REAL_PYTHON=sys.executable, **named)

    return submit


def list_hosts(*nodes):
    """Return the setting of engines on rank 0's own node, if it is the first of `nodes`, and on others."""
    hosts = ["127.0.0.1" if node.name == "node0" else node.address for node in nodes]
    return f"--rollout.hosts={json.dumps(hosts, separators=(',', ':'))}"


def starts(job, rank=0):
    file = job.folder / f"started.{rank}"
    return file.read_text().splitlines() if file.exists() else []


def test_ranks_know_their_place_and_have_files_of_their_own(stand_in, cluster):
    job, address, hosts = stand_in(0), cluster.nodes[0].address, list_hosts(*cluster.nodes[:2])
    assert job.wait(600) == "COMPLETED 0", job.texts()
    command = f"-m megatron_rl train run.toml {hosts} --checkpoint.resume=auto --sync.transport=gloo --sync.host={address} --train.steps=3"
    assert [starts(job, rank) for rank in range(2)] == [[f"{rank} 0 2 {address} {command}"] for rank in range(2)]
    assert [job.rank(rank).read_text() for rank in range(2)] == ["rank 0 was here\n", "rank 1 was here\n"]
    assert f"ranks on node0 node1, logs in {job.folder}/runs/slurm/{job.id}" in job.printed()


def test_every_node_of_a_colocated_job_has_engines(stand_in):
    job = stand_in("engines", arguments=FOUR_ENGINES)
    assert job.wait(1200) == "COMPLETED 0", job.texts()
    assert_engines(job, ["node0", "node0", "node1", "node1"])


def test_an_engine_over_two_nodes_has_a_process_on_each(stand_in):
    over_two = ("--model.path=model", "--rollout.tp=2", "--rollout.nodes_per_engine=2")
    job = stand_in("engines", arguments=over_two)
    assert job.wait(1200) == "COMPLETED 0", job.texts()
    reports = [read_report(job.folder / name) for name in ("engine.log", "engine.node1.log")]
    assert [(report["node"], report["rank"]) for report in reports] == [("node0", "0"), ("node1", "1")]
    assert len({report["meeting"] for report in reports}) == 1 and reports[0]["meeting"].startswith(f"{job.cluster.nodes[0].address}:")
    assert_nothing_is_left(job)


def test_the_last_nodes_of_a_disaggregated_job_are_the_engines(stand_in):
    named = {"script": DISAGGREGATED, "nodes": 3, "ENGINE_NODES": "2"}
    job = stand_in("engines", arguments=FOUR_ENGINES, **named)
    assert job.wait(1200) == "COMPLETED 0", job.texts()
    nodes = job.cluster.nodes
    address, placed = nodes[0].address, f"--placement.kind=disaggregated {list_hosts(*nodes[1:3])}"
    settings = f"{placed} --checkpoint.resume=auto --sync.transport=process_group --sync.host={address}"
    assert starts(job) == [f"0 0 1 {address} -m megatron_rl train run.toml {settings} {' '.join(FOUR_ENGINES)}"] and not starts(job, 1)
    assert "ranks on node0, logs in" in job.printed()
    assert_engines(job, ["node1", "node1", "node2", "node2"])


def read_report(log):
    return json.loads(next(line for line in log.read_text().splitlines() if line.startswith("{")))


def assert_engines(job, nodes):
    """Assert the nodes that engines 0, 1, ... reported, and that they counted their devices node by node. `support.slurm_trainer` has
    seen them end."""
    reports = [read_report(job.folder / f"engine{number}.log") for number in range(len(nodes))]
    hosts = {node.name: "127.0.0.1" if node.name == "node0" else node.address for node in job.cluster.nodes}
    assert [(report["node"], report["host"]) for report in reports] == [(node, hosts[node]) for node in nodes]
    cores = os.cpu_count() or 1
    assert [report["cores"] for report in reports] == [str(nodes[:number].count(node) % cores) for number, node in enumerate(nodes)]
    assert_nothing_is_left(job)


def test_a_job_that_is_warned_stops_and_starts_itself_again(stand_in, cluster):
    job = stand_in("stop", 0)
    until(lambda: len(starts(job, 0)) == len(starts(job, 1)) == 1, 600, "both ranks")
    cluster.run("scancel", "--batch", "--signal=USR1", job.id)  # as --signal=B:USR1@300 does
    assert job.wait(900) == "COMPLETED 0", job.texts()
    assert [len(starts(job, rank)) for rank in range(2)] == [2, 2]
    assert "stopped by a signal; starting the job again" in job.printed() and "start 2, ranks on" in job.printed()


def test_slurm_warns_a_job_before_its_time_is_up(stand_in):
    job = stand_in("stop", 0, options=("--time=2", "--signal=B:USR1@90"))
    assert job.wait(900) == "COMPLETED 0", job.texts()
    assert len(starts(job)) == 2 and "stopped by a signal; starting the job again" in job.printed()


def test_a_job_that_slurm_requeues_goes_on(stand_in, cluster):
    job = stand_in("stop", 0)
    until(lambda: len(starts(job, 0)) == len(starts(job, 1)) == 1, 600, "both ranks")
    cluster.run("scontrol", "requeue", job.id)
    assert job.wait(900) == "COMPLETED 0", job.texts()
    assert len(starts(job)) == 2 and job.state()["Restarts"] == "1"


def test_a_job_that_is_cancelled_stays_so(stand_in, cluster):
    job = stand_in("stop", 0)
    until(lambda: len(starts(job, 0)) == len(starts(job, 1)) == 1, 600, "both ranks")
    cluster.run("scancel", job.id)
    assert job.wait(600).startswith("CANCELLED"), job.texts()
    assert len(starts(job)) == 1


def test_a_run_that_breaks_is_started_again_so_often(stand_in):
    job = stand_in(3, 1, 3, RESTARTS="1")
    assert job.wait(900) == "FAILED 1", job.texts()
    assert len(starts(job)) == 2
    assert "broken with exit code 3; starting the job again" in job.printed() and "broken 2 times; RESTARTS = 1" in job.printed()
    assert "rank 0 was here" in job.printed(), "the last lines of rank 0"


def test_a_users_mistake_is_not_tried_again(stand_in):
    job = stand_in(2)
    assert job.wait(600) == "FAILED 2" and len(starts(job)) == 1


def test_a_bad_variable_is_one_line(cluster, tmp_path):
    (tmp_path / "run.toml").write_text("")
    mistakes = [
        ((), {}, "CONFIG is missing"),
        (("none.toml",), {}, "CONFIG = 'none.toml': no such file in "),
        (("run.toml",), {"RESTARTS": "often"}, "RESTARTS = 'often': must be a whole number from 0 to 1000"),
        (("run.toml",), {"MASTER_PORT": "80"}, "MASTER_PORT = '80': must be a whole number from 1024 to 65535"),
        (("run.toml",), {"PYTHON": "/none"}, "PYTHON = '/none': cannot be run"),
        (("run.toml",), {"MEGATRON_RL_ROOT": "/none"}, "MEGATRON_RL_ROOT = '/none': is not the repository"),
        (("run.toml",), {"script": DISAGGREGATED, "ENGINE_NODES": "2"}, "ENGINE_NODES = '2': must be a whole number from 1 to 1"),
    ]
    jobs = [Job(cluster, tmp_path, *arguments, **variables) for arguments, variables, _ in mistakes]
    for job, (_, _, line) in zip(jobs, mistakes, strict=True):
        assert job.wait(600) == "FAILED 2", line
        (message,) = job.printed().splitlines()
        assert message.startswith(f"megatron-rl slurm: {line}")


def quickstart(cluster, folder, changes, script):
    """Submit a run for the last two nodes, which no other test uses."""
    settings = {**TINY, "model.path": folder / "model", "log.dir": folder / "runs" / "small", **CHANGES, **changes}
    return Job(cluster, folder, *make_model(folder, settings), script=script, first=LAST_TWO)


def wait_for(job, condition, what):
    until(lambda: condition() or job.state()["JobState"] == "FAILED", 1500, f"{what}\n{job.texts()}")


def stopped_and_started_again(cluster, folder):
    """Warn a job, as SLURM does before its time is up, and preempt it later. Its engine is on both nodes."""
    job = quickstart(cluster, folder, {"rollout.tp": 2, "rollout.nodes_per_engine": 2}, COLOCATED)
    run = folder / "runs" / "small" / "latest"
    wait_for(job, lambda: len(rows(run)) >= 2, "the first step")
    cluster.run("scancel", "--batch", "--signal=USR1", job.id)
    wait_for(job, lambda: job.state()["Restarts"] == "1", "the second start")
    wait_for(job, lambda: "step 9/20" in job.rank(0).read_text(), "the ninth step")
    nodes = f"--nodelist=node[{LAST_TWO}-{LAST_TWO + 1}]"
    cluster.run("sbatch", "--partition=urgent", "--exclusive", "--nodes=2", nodes, f"--chdir={folder}", "--wrap=sleep 1")
    wait_for(job, lambda: job.state()["Restarts"] == "2", "the third start")
    assert job.wait(1500) == "COMPLETED 0", job.texts()
    assert [node.list_files() for node in cluster.nodes[LAST_TWO:]] == [[], []]
    return job


def with_an_engine_elsewhere(cluster, folder):
    job = quickstart(cluster, folder, {"train.layout.tp": 1, "train.steps": 1}, DISAGGREGATED)
    assert job.wait(1500) == "COMPLETED 0", job.texts()
    assert [node.list_files() for node in cluster.nodes[LAST_TWO:]] == [[], []]
    return job


def rows(run):
    return read_rows(run) if (run / "metrics.jsonl").exists() else []


def assert_nothing_is_left(job):
    """Assert that no node has a process of the job."""
    left = command_lines(process for node in job.cluster.nodes for process in node.list_processes())
    assert [words for words in left.values() if any(str(job.folder) in word for word in words)] == []


def test_the_quickstart_on_two_nodes_is_warned_and_preempted_and_has_the_bits_of_one(quickstarts, tmp_path):
    job = quickstarts["colocated"].result()
    run = job.folder / "runs" / "small" / "latest"
    assert [row["step"] for row in rows(run)] == list(range(21)) and all(row["sync/proved"] == 30 for row in rows(run))
    done = finish(train(tmp_path, CHANGES | {"rollout.tp": 2}, launcher=TORCHRUN))
    assert done.code == 0, done.err
    compare_rows(run, latest(tmp_path))
    state = json.loads((run / "run.json").read_text())
    assert state["status"] == "finished" and len(state["resumed"]) == 2 and state["resumed"][0]["step"] >= 1
    assert all(f"run broken: stopped by {name}" in (run / "run.log").read_text() for name in ("SIGUSR1", "SIGTERM"))
    assert len(list(run.parent.glob("20*"))) == 1
    assert "stopped by a signal; starting the job again" in job.printed()
    assert "step 20/20" in job.rank(0).read_text() and job.rank(1).exists()
    for rank in range(2):
        assert (run / "ranks" / f"rank_0000{rank}.log").read_text().count(f"rank {rank} of 2: process ") == 3
    scalars = set(EventAccumulator(str(run / "tensorboard")).Reload().Tags()["scalars"])
    assert {f"time/{phase}" for phase in PHASES} <= scalars
    assert_nothing_is_left(job)


def test_an_engine_on_a_node_of_its_own(quickstarts):
    job = quickstarts["disaggregated"].result()
    assert [row["sync/proved"] for row in rows(job.folder / "runs" / "small" / "latest")] == [15, 15]
    assert_nothing_is_left(job)
