from support import families, trainer_engine

DENSE = {"first_k_dense_replace": 2, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8}


def start(kind, folder, precision, layout, rollout, over):
    families.ENGINE_ARCHITECTURES[kind] = {**families.ENGINE_ARCHITECTURES[kind], **over}
    trainer_engine.start_architecture(kind, folder, precision, layout, rollout, True)


def change(kind, seed, over):
    families.ENGINE_ARCHITECTURES[kind] = {**families.ENGINE_ARCHITECTURES[kind], **over}
    trainer_engine.change_weights(kind, seed)
