import sys
sys.path.insert(0, "/tmp/oldgraph")
from support import trainer_engine
from support.trainer import Trainer

def compare(folder, precision, plant="", lora=None):
    from dataclasses import asdict
    from old_graph.megatron_reader import read_rank_graph as old
    from megatron_rl.mcore.precision_graph import read_rank_graph as new
    with trainer_engine.planted(plant) if hasattr(trainer_engine, "planted") else __import__("contextlib").nullcontext():
        model = Trainer(folder, precision, *([lora] if lora else [])).model
        a, b = old(model).to_json(), new(model).to_json()
    import json
    a, b = json.loads(json.dumps(a)), json.loads(json.dumps(b))
    key = lambda e: json.dumps(e, sort_keys=True)
    return (a["nodes"] == b["nodes"], a["edges"] == b["edges"], sorted(map(key, a["nodes"])) == sorted(map(key, b["nodes"])), sorted(map(key, a["edges"])) == sorted(map(key, b["edges"])),
            [e for e in a["edges"] if e not in b["edges"]][:3], [e for e in b["edges"] if e not in a["edges"]][:3], [n for n in a["nodes"] if n not in b["nodes"]][:3], [n for n in b["nodes"] if n not in a["nodes"]][:3])
