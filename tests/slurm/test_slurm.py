"""launch/slurm with a real SLURM of three nodes on this machine: Debian's packages, unpacked but not installed (slurm_cluster.py)."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from slurm_cluster import Cluster, NoSlurmError, unpack_slurm
from support.processes import ROOT, command_lines, until
from support.train_command import TINY, make_model, read_rows
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = [pytest.mark.long, pytest.mark.timeout(4000)]
COLOCATED, DISAGGREGATED = (ROOT / "launch" / "slurm" / f"{kind}.sbatch" for kind in ("colocated", "disaggregated"))
EACH_NODE = ("--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1", "--time=60", "--oversubscribe")
CHANGES = {"train.layout.tp": 2, "train.steps": 20, "checkpoint.every": 1}  # ten seconds or more: the signal comes in the middle
ONE_ADDRESS = '--rollout.hosts=["127.0.0.1","127.0.0.1"]'  # as all nodes of this SLURM have one address
FOUR_ENGINES = ("--model.path=model", "--rollout.engines=4")
PHASES = {"generate", "reward", "logprobs", "train", "sync", "proof", "eval", "checkpoint", "step"}
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
    try:
        root = unpack_slurm(folder)
    except NoSlurmError as error:
        pytest.skip(f"no SLURM: {error}")
    with Cluster(root, folder / "cluster", 3) as cluster:
        yield cluster


@pytest.fixture(scope="module", autouse=True)
def quickstarts(cluster, tmp_path_factory):
    """The quickstart in both placements, one after the other, while the tests with stand-ins run."""
    with ThreadPoolExecutor(1) as pool:
        runs = {"colocated": stopped_and_started_again, "disaggregated": with_an_engine_elsewhere}
        yield {name: pool.submit(run, cluster, tmp_path_factory.mktemp(name)) for name, run in runs.items()}
        pool.shutdown(cancel_futures=True)


class Job:
    """A script submitted for the first nodes of the cluster, with all its files in `folder`."""

    def __init__(self, cluster, folder, *arguments, script=COLOCATED, nodes=2, **variables):
        self.cluster, self.folder = cluster, folder
        environment = {"MEGATRON_RL_ROOT": str(ROOT), "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **variables}
        placement = (f"--nodes={nodes}", f"--nodelist=node[1-{nodes}]", f"--chdir={folder}")
        self.id = cluster.run("sbatch", "--parsable", *placement, *EACH_NODE, script, *arguments, env=environment)

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


def starts(job, rank=0):
    file = job.folder / f"started.{rank}"
    return file.read_text().splitlines() if file.exists() else []


def test_ranks_know_their_place_and_have_files_of_their_own(stand_in):
    job = stand_in(0)
    assert job.wait(600) == "COMPLETED 0", job.texts()
    command = (
        f"-m megatron_rl train run.toml {ONE_ADDRESS} --checkpoint.resume=auto --sync.transport=gloo --sync.host=127.0.0.1 --train.steps=3"
    )
    assert [starts(job, rank) for rank in range(2)] == [[f"{rank} 0 2 127.0.0.1 {command}"] for rank in range(2)]
    assert [job.rank(rank).read_text() for rank in range(2)] == ["rank 0 was here\n", "rank 1 was here\n"]
    assert f"ranks on node1 node2, logs in {job.folder}/runs/slurm/{job.id}" in job.printed()


def test_every_node_of_a_colocated_job_has_engines(stand_in):
    job = stand_in("engines", arguments=FOUR_ENGINES, PYTHONPATH=f"{ROOT}:{ROOT}/tests")
    assert job.wait(1200) == "COMPLETED 0", job.texts()
    assert_engines(job, ["node1", "node1", "node2", "node2"])


def test_an_engine_over_two_nodes_has_a_process_on_each(stand_in):
    over_two = ("--model.path=model", "--rollout.tp=2", "--rollout.nodes_per_engine=2")
    job = stand_in("engines", arguments=over_two, PYTHONPATH=f"{ROOT}:{ROOT}/tests")
    assert job.wait(1200) == "COMPLETED 0", job.texts()
    reports = [read_report(job.folder / name) for name in ("engine.log", "engine.node1.log")]
    assert [(report["node"], report["rank"]) for report in reports] == [("node1", "0"), ("node2", "1")]
    assert len({report["meeting"] for report in reports}) == 1 and reports[0]["meeting"].startswith("127.0.0.1:")
    assert_nothing_is_left(job.folder)


def test_the_last_nodes_of_a_disaggregated_job_are_the_engines(stand_in):
    named = {"script": DISAGGREGATED, "nodes": 3, "ENGINE_NODES": "2", "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    job = stand_in("engines", arguments=FOUR_ENGINES, **named)
    assert job.wait(1200) == "COMPLETED 0", job.texts()
    settings = f"--placement.kind=disaggregated {ONE_ADDRESS} --checkpoint.resume=auto --sync.transport=process_group --sync.host=127.0.0.1"
    assert starts(job) == [f"0 0 1 127.0.0.1 -m megatron_rl train run.toml {settings} {' '.join(FOUR_ENGINES)}"] and not starts(job, 1)
    assert "ranks on node1, logs in" in job.printed()
    assert_engines(job, ["node2", "node2", "node3", "node3"])


def read_report(log):
    return json.loads(next(line for line in log.read_text().splitlines() if line.startswith("{")))


def assert_engines(job, nodes):
    """Assert the nodes that engines 0, 1, ... reported, and that they counted their devices node by node. `support.slurm_trainer` has
    seen them end."""
    reports = [read_report(job.folder / f"engine{number}.log") for number in range(len(nodes))]
    assert [(report["node"], report["host"]) for report in reports] == [(node, "127.0.0.1") for node in nodes]
    cores = os.cpu_count() or 1
    assert [report["cores"] for report in reports] == [str(nodes[:number].count(node) % cores) for number, node in enumerate(nodes)]
    assert_nothing_is_left(job.folder)


def test_a_job_that_is_warned_stops_and_starts_itself_again(stand_in, cluster):
    job = stand_in("stop", 0)
    until(lambda: len(starts(job, 0)) == len(starts(job, 1)) == 1, 600, "both ranks")
    cluster.run("scancel", "--batch", "--signal=USR1", job.id)  # as --signal=B:USR1@300 does
    assert job.wait(900) == "COMPLETED 0", job.texts()
    assert [len(starts(job, rank)) for rank in range(2)] == [2, 2]
    assert "stopped by a signal; starting the job again" in job.printed() and "start 2, ranks on" in job.printed()


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
    settings = {**TINY, "model.path": folder / "model", "log.dir": folder / "runs" / "small", **CHANGES, **changes}
    return Job(cluster, folder, *make_model(folder, settings), script=script)


def stopped_and_started_again(cluster, folder):
    job = quickstart(cluster, folder, {"rollout.tp": 2, "rollout.nodes_per_engine": 2}, COLOCATED)  # one engine, on both nodes
    run = folder / "runs" / "small" / "latest"
    until(lambda: len(rows(run)) >= 2 or job.state()["JobState"] == "FAILED", 1500, f"the first step\n{job.texts()}")
    cluster.run("scancel", "--batch", "--signal=USR1", job.id)
    until(lambda: job.state()["Restarts"] == "1" or job.state()["JobState"] == "FAILED", 600, f"the job starts again\n{job.texts()}")
    assert job.wait(1500) == "COMPLETED 0", job.texts()
    return job


def with_an_engine_elsewhere(cluster, folder):
    job = quickstart(cluster, folder, {"train.layout.tp": 1, "train.steps": 1}, DISAGGREGATED)
    assert job.wait(1500) == "COMPLETED 0", job.texts()
    return job


def rows(run):
    return read_rows(run) if (run / "metrics.jsonl").exists() else []


def assert_nothing_is_left(folder):
    alive = command_lines(psutil.process_iter())
    assert [words for words in alive.values() if any(str(folder) in word for word in words)] == []


def test_the_quickstart_trains_on_two_nodes_is_stopped_starts_again_and_goes_on(quickstarts):
    job = quickstarts["colocated"].result()
    run = job.folder / "runs" / "small" / "latest"
    assert [row["step"] for row in rows(run)] == list(range(21)) and all(row["sync/proved"] == 30 for row in rows(run))
    state = json.loads((run / "run.json").read_text())
    assert state["status"] == "finished" and len(state["resumed"]) == 1 and state["resumed"][0]["step"] >= 1
    assert "run broken: stopped by SIGUSR1" in (run / "run.log").read_text() and len(list(run.parent.glob("20*"))) == 1
    assert "stopped by a signal; starting the job again" in job.printed()
    assert "step 20/20" in job.rank(0).read_text() and job.rank(1).exists()
    for rank in range(2):
        assert (run / "ranks" / f"rank_0000{rank}.log").read_text().count(f"rank {rank} of 2: process ") == 2
    scalars = set(EventAccumulator(str(run / "tensorboard")).Reload().Tags()["scalars"])
    assert {f"time/{phase}" for phase in PHASES} <= scalars
    assert_nothing_is_left(job.folder)


def test_an_engine_on_a_node_of_its_own(quickstarts):
    job = quickstarts["disaggregated"].result()
    assert [row["sync/proved"] for row in rows(job.folder / "runs" / "small" / "latest")] == [15, 15]
    assert_nothing_is_left(job.folder)
