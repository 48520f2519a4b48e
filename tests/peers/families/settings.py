"""What the shrinking of a config cannot know: fields of single model types."""

from __future__ import annotations

from typing import Any

PLAIN_HEADS: frozenset[str] = frozenset({"xlnet"})
"""Models that need hidden = heads x head_dim."""

TRANSPOSED: dict[str, str] = {"qwen3_vl_moe": r".*\.mlp\.experts\.(gate_up_proj|down_proj)"}
"""Tensors whose last two axes published files have the other way round than a model that transformers made writes them;
a regular expression, by model type."""

SETTINGS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_expert_group": 2,
        "n_group": 2,
    },
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 3, "mamba_n_groups": 2},
    "blt": {
        "encoder_hash_byte_group_vocab": 61,
        "encoder_hash_byte_group_size": [3, 4],
        "encoder_config.hidden_size_global": 64,
        "decoder_config.hidden_size_global": 64,
        "encoder_config.head_dim": 16,
        "encoder_cross_output_size": ...,
    },
    "chameleon": {"vocabulary_map": {"IMGIMGA": 20, "<image>": 21}, "vq_config.resolution": 32},
    "codegen": {"rotary_dim": 8},
    "cohere_compass": {
        "text_config.rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
        }
    },
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
        }
    },
    "dbrx": {
        "attn_config.rope_theta": 10000.0,
        "attn_config.kv_n_heads": 2,
        "ffn_config.moe_top_k": 2,
        "attn_config.clip_qkv": 8.0,
    },
    "deepseek_ocr2": {
        "text_config.num_experts_per_tok": 2,
        "text_config.mlp_layer_types": ["dense", "sparse"],
        "text_config.n_group": 1,
        "text_config.topk_group": 1,
        "vision_config.sam_config.downsample_channels": [32, 64],
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "diffusion_gemma": {
        "text_config.num_experts": 8,
        "text_config.moe_intermediate_size": 32,
        "text_config.top_k_experts": 2,
        "canvas_length": 24,
    },
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots3_note": {
        "text_config.per_layer_config": {
            2: {
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "q_lora_rank": 24,
                "kv_lora_rank": 16,
                "head_dim": 24,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8,
                "v_head_dim": 16,
            }
        },
        "text_config.shared_experts_intermediate_size": 48,
        "text_config.rope_parameters": ...,
        "vision_config.adapter_in_dim": 64,
        "audio_config.adapter_input_size": 64,
        "audio_config.conv_output_size": 1024,
        "audio_config.feature_size": 16,
    },
    "dots3_note_text": {
        "per_layer_config": {
            2: {
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "q_lora_rank": 24,
                "kv_lora_rank": 16,
                "head_dim": 24,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8,
                "v_head_dim": 16,
            }
        },
        "shared_experts_intermediate_size": 48,
        "rope_parameters": ...,
    },
    "emu3": {"vocabulary_map": {"<|visual token 000000|>": 20, "<image>": 21}},
    "ernie4_5_vl_moe": {"text_config.rope_parameters.mrope_section": [1, 1, 2]},
    "esm": {"vocab_size": 272, "pad_token_id": 1, "mask_token_id": 32},
    "esmc": {"num_key_value_heads": 8, "head_dim": 8},
    "falcon_h1": {"mamba_n_groups": 2},
    "florence2": {
        "vision_config.embed_dim": [16, 16, 32, 64],
        "vision_config.num_heads": [2, 2, 4, 8],
        "vision_config.num_groups": [2, 2, 4, 8],
        "vision_config.depths": [1, 1, 1, 1],
        "vision_config.projection_dim": 64,
    },
    "fsmt": {"src_vocab_size": 272, "tgt_vocab_size": 272},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 16},
    "gemma3n_text": {"num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 2,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "global_head_dim": 16,
            "vocab_size": 272,
            "max_position_embeddings": 128,
        },
        "num_centroids": 16,
        "centroid_intermediate_top_k": 4,
    },
    "gemma4_unified_assistant": {
        "text_config.num_kv_shared_layers": 2,
        "num_centroids": 16,
        "centroid_intermediate_top_k": 4,
    },
    "glm46v": {"text_config.rope_parameters.mrope_section": [2, 1, 1]},
    "glm4v": {"text_config.rope_parameters.mrope_section": [2, 1, 1]},
    "glm4v_moe": {
        "text_config.rope_parameters.mrope_section": [2, 1, 1],
        "text_config.rope_parameters.partial_rotary_factor": 1.0,
    },
    "glm5_next": {"text_config.num_key_value_heads": 8, "text_config.qk_head_dim": 16},
    "glm_moe_dsa": {"num_key_value_heads": 8},
    "glm_ocr": {"text_config.rope_parameters.mrope_section": [2, 1, 1]},
    "glmga": {"text_config.rope_parameters.mrope_section": [2, 1, 1]},
    "gptj": {"rotary_dim": 8},
    "granite4_vision": {
        "deepstack_layer_map": [[-2, 0], [-1, 1]],
        "spatial_target_layers": [0, 1],
        "downsample_rate": "1/2",
    },
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_hidden_layers": 3,
        "mamba_n_groups": 2,
    },
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "moe_topk": 2, "num_experts": 8},
    "hunyuan_vl": {"text_config.head_dim": 16, "text_config.rope_parameters.mrope_section": [4, 2, 2]},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1, "num_hidden_layers": 4, "mamba_dt_rank": 8},
    "jetmoe": {"kv_channels": 16},
    "kyutai_speech_to_text": {
        "num_codebooks": 4,
        "codebook_vocab_size": 33,
        "codec_config.vector_quantization_hidden_dimension": 16,
        "codec_config.codebook_dim": 64,
        "codec_config.num_filters": 4,
        "codec_config.upsample_groups": 64,
        "codec_config.num_quantizers": 4,
    },
    "laguna": {"num_attention_heads_per_layer": [8, 4], "layer_types": ["full_attention", "sliding_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "num_dense_layers": 1},
    "llama4": {
        "vision_config.vision_output_dim": 64,
        "vision_config.projector_input_dim": 64,
        "vision_config.projector_output_dim": 64,
        "text_config.intermediate_size_mlp": 128,
    },
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"], "moe_layers": [1]},
    "longcat_flash": {"zero_expert_num": 4},
    "luke": {"entity_vocab_size": 50, "entity_emb_size": 16},
    "mellum": {"layer_types": ["full_attention", "sliding_attention"]},
    "minimax": {"head_dim": 16, "block_size": 8},
    "ministral": {"head_dim": 16},
    "moonshine_streaming": {"num_key_value_heads": 2},
    "muse_spark": {"audio_config.hidden_sizes": [16, 32], "audio_config.depths": [1, 1]},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h_omni": {"vision_config.max_img_size": 64},
    "paddleocr_vl": {"text_config.rope_parameters.mrope_section": [4, 2, 2]},
    "perceiver": {"d_latents": 64, "num_latents": 16, "num_self_attends_per_block": 2},
    "phi4_multimodal": {
        "audio_config.ext_pw_out_channel": 64,
        "audio_config.depthwise_separable_out_channel": 64,
        "audio_config.nemo_conv_channels": 32,
        "audio_config.input_size": 16,
        "audio_config.nemo_final_size": 2,
        "vision_config.crop_size": 32,
    },
    "pp_formulanet": {
        "vision_config.post_conv_in_channels": 32,
        "vision_config.post_conv_out_channels": 64,
        "vision_config.post_conv_mid_channels": 32,
    },
    "qwen3_vl_moe": {"text_config.moe_intermediate_size": 24},
    "qwen2_5_omni_thinker": {"text_config.rope_parameters.mrope_section": [2, 1, 1]},
    "qwen2_5_vl": {"text_config.rope_parameters.mrope_section": [2, 1, 1]},
    "qwen2_vl": {"text_config.rope_parameters.mrope_section": [2, 1, 1]},
    "qwen3_omni_moe": {"talker_config.text_config.shared_expert_intermediate_size": 48},
    "qwen4_exp": {
        "text_config.indexer_n_heads": 4,
        "text_config.indexer_kv_heads": 1,
        "text_config.indexer_head_dim": 16,
        "text_config.indexer_budget": 16,
        "text_config.indexer_compress_ratio": 2,
        "text_config.ple_embed_dim": 64,
        "text_config.hc_lowrank": 16,
        "text_config.ngram_vocab_size_base": 64,
        "text_config.split_ngram_parts": 2,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 2,
        "ple_embed_dim": 64,
        "hc_lowrank": 16,
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 2,
    },
    "reformer": {
        "axial_pos_shape": [8, 16],
        "axial_pos_embds_dim": [16, 48],
        "is_decoder": True,
        "num_buckets": 4,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "hash_seed": 7,
    },
    "roc_bert": {"pronunciation_vocab_size": 50, "shape_vocab_size": 60},
    "step3p7": {
        "text_config.layer_types": ["full_attention", "sliding_attention"],
        "text_config.sliding_window": 16,
        "text_config.rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "unlimited_ocr": {"vision_config.sam_config.downsample_channels": [32, 64]},
    "vibevoice": {
        "semantic_model_config.num_filters": 4,
        "semantic_model_config.downsampling_ratios": [2, 2],
        "semantic_model_config.depths": [1, 1, 1],
        "audio_config.num_filters": 4,
        "audio_config.downsampling_ratios": [2, 2],
        "audio_config.depths": [1, 1, 1],
    },
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config.num_filters": 4,
        "acoustic_tokenizer_encoder_config.downsampling_ratios": [2, 2],
        "acoustic_tokenizer_encoder_config.depths": [1, 1, 1],
        "semantic_tokenizer_encoder_config.num_filters": 4,
        "semantic_tokenizer_encoder_config.downsampling_ratios": [2, 2],
        "semantic_tokenizer_encoder_config.depths": [1, 1, 1],
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "mamba_dt_rank": 8,
    },
    "zamba2": {
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"],
        "hybrid_layer_ids": [1, 3, 4],
        "num_mem_blocks": 2,
        "kv_channels": 16,
        "num_key_value_heads": 8,
        "attention_hidden_size": 128,
        "attention_head_dim": 16,
        "mamba_ngroups": 2,
        "use_shared_attention_adapter": True,
    },
}
"""By model type; ``a.b`` is a field of a sub-config, ``...`` leaves a field to the class."""
