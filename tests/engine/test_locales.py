"""A run with Chinese data, paths, prompts, and code, under a locale whose encoding is ASCII or GBK."""

import json
import shutil
import subprocess

import pytest
from support.processes import ROOT, Command
from support.train_command import TINY, finish, latest, make_model, read_rows

JUDGE = """
def judge(text, problem):
    '''评分'''
    assert problem.columns["备注"] == "题目：一" and "等于几" in problem.prompt
    print("评分：", text)
    return 0.5
"""


def make_locale(folder):
    """Return the environment of a locale in GBK. Skip where its sources are not installed."""
    if shutil.which("localedef"):
        subprocess.run(["localedef", "-i", "zh_CN", "-f", "GBK", folder / "zh_CN.GBK"], check=False)
    if not (folder / "zh_CN.GBK").is_dir():
        pytest.skip("localedef cannot make a locale in GBK")
    return {"LOCPATH": str(folder), "LC_ALL": "zh_CN.GBK"}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ascii", pytest.param("gbk", marks=pytest.mark.long)])
def test_a_run_with_chinese_files_does_not_depend_on_the_locale(tmp_path, monkeypatch, kind):
    folder = tmp_path / "数据"
    folder.mkdir()
    row = {"question": "一加一等于几？", "answer": "一加一\n#### 2", "备注": "题目：一"}
    rows = [row | {"question": f"{number}{row['question']}"} for number in range(4)]
    (folder / "训练.jsonl").write_text("\n".join(json.dumps(each, ensure_ascii=False) for each in rows), encoding="utf-8")
    (folder / "own_judge_zh.py").write_text(JUDGE, encoding="utf-8")
    changes = {"model.path": folder / "模型", "log.dir": folder / "runs", "train.steps": 1, "checkpoint.every": 1}
    _, *arguments = make_model(folder, {**TINY, **changes})
    config = (ROOT / "configs" / "quickstart.toml").read_text(encoding="utf-8")
    lines = [line for line in config.splitlines() if not line.startswith(("train =", "eval =", "settings =", "eval_"))]
    lines[lines.index("[data]")] += f'\ntrain = "{folder}/训练.jsonl"\nformat = "gsm8k"\nprompt_template = "问题：{{question}}"\n'
    (folder / "配置.toml").write_text("\n".join(lines), encoding="utf-8")
    for name, value in {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{ROOT}")
    for name, value in (make_locale(tmp_path) if kind == "gbk" else {}).items():
        monkeypatch.setenv(name, value)
    arguments = [word for word in arguments if not word.startswith("--data.")]
    arguments += ["--reward.function=own_judge_zh:judge", "--data.max_prompt_tokens=200"]
    done = finish(Command(folder, "megatron_rl", "train", folder / "配置.toml", *arguments))
    assert done.code == 0, done.err
    (sample, *_) = read_rows(latest(folder), "samples.jsonl")
    assert sample["prompt"].startswith("问题：") and sample["reward"] == 0.5
    checkpoint, export = latest(folder) / "checkpoints" / "step_00001", folder / "导出"
    done = finish(Command(folder, "megatron_rl", "export", "--checkpoint", checkpoint, "--output", export))
    assert done.code == 0 and (export / "config.json").is_file(), done.err
    done = finish(Command(folder, "megatron_rl", "report", latest(folder).resolve()))
    assert done.code == 0 and "问题：" in (latest(folder) / "report.html").read_text(encoding="utf-8"), done.err
