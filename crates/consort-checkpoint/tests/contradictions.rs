//! Configurations that contradict the tensors beside them: whatever both speak of must agree, and a refusal names the tensor or
//! the key, what is declared and what is there. The files are those of the reference, changed in one place.

mod common;

use std::path::{Path, PathBuf};

use common::{Stored, altered};
use consort_checkpoint::Checkpoint;
use serde_json::{Value, json};

const Q: &str = "model.layers.0.self_attn.q_proj";

fn fixture(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    match name.strip_prefix("schemes/") {
        Some(name) => root.join("tests/schemes").join(name),
        None => root.join("../../oracle/fixtures").join(name),
    }
}

/// Opens a directory and reads every weight.
fn verdict(directory: &Path) -> Result<(), String> {
    let checkpoint = Checkpoint::open(directory).map_err(|error| error.to_string())?;
    let read = |name: &str| checkpoint.read_f32(name).map(|_| ()).map_err(|error| error.to_string());
    checkpoint.tensors().iter().try_for_each(|tensor| read(&tensor.name))
}

/// Sets the value at a path of keys; null removes it.
fn set(config: &mut Value, key: &str, value: Value) {
    let (parents, last) = key.rsplit_once('/').map_or((None, key), |(parents, last)| (Some(parents), last));
    let place = parents.into_iter().flat_map(|keys| keys.split('/')).fold(config, |place, key| &mut place[key]);
    match value {
        Value::Null => _ = place.as_object_mut().unwrap().remove(last),
        value => place[last] = value,
    }
}

fn with_config(name: &str, key: &str, value: Value) -> Result<(), String> {
    verdict(altered(&fixture(name), |config| set(config, key, value), |_| {}).path())
}

fn with_tensors(name: &str, change: impl FnOnce(&mut Vec<Stored>)) -> Result<(), String> {
    verdict(altered(&fixture(name), |_| {}, change).path())
}

const QUANTIZATION: &str = "quantization_config";

fn layers_of_modelopt(layers: Value) -> Value {
    json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
}

fn auto_round(packing: &str) -> Value {
    json!({"quant_method": "intel/auto-round", "packing_format": packing, "bits": 4, "group_size": 64, "sym": false,
        "data_type": "int", "extra_config": {"lm_head": {"bits": 16}, "model.layers.0": {"bits": 4}}})
}

const WEIGHTS: &str = "quantization_config/config_groups/group_0/weights";

#[test]
fn settings_that_the_tensors_contradict_are_refused() {
    let q = |key: &str| format!("{QUANTIZATION}/{key}");
    let w = |key: &str| format!("{WEIGHTS}/{key}");
    let targets = format!("{QUANTIZATION}/config_groups/group_0/targets");
    let cases = [
        // Integers of compressed-tensors.
        ("llama-int4-compressed", w("symmetric"), json!(true), "symmetric is true, but there is a weight_zero_point"),
        ("llama-int4-compressed", w("symmetric"), json!(null), "symmetric is true, but there is a weight_zero_point"),
        (
            "schemes/int4-compressed-tensors",
            w("symmetric"),
            json!(false),
            "symmetric is false, but weight_zero_point is missing",
        ),
        ("llama-int4-compressed", w("symmetric"), json!("false"), "weights.symmetric: is \"false\", not true or false"),
        (
            "llama-int4-compressed",
            w("group_size"),
            json!(32),
            "a scale for every 64 columns, but one for 32 is declared",
        ),
        (
            "llama-int4-compressed",
            w("group_size"),
            json!(128),
            "a scale for every 64 columns, but one for 128 is declared",
        ),
        ("llama-int4-compressed", w("group_size"), json!("64"), "weights.group_size: is \"64\", not a whole number"),
        ("llama-int4-compressed", w("group_size"), json!(0), "weights.group_size: is 0"),
        ("llama-int4-compressed", w("group_size"), json!(null), "group_size: is missing, but the strategy is group"),
        ("llama-int4-compressed", w("strategy"), json!("channel"), "group_size: is 64, but the strategy has no groups"),
        (
            "schemes/int8-compressed-tensors",
            w("strategy"),
            json!("nonsense"),
            "strategy: \"nonsense\" is not supported",
        ),
        ("llama-int4-compressed", w("num_bits"), json!(8), "a scale for every 32 columns, but one for 64 is declared"),
        ("llama-int4-compressed", w("num_bits"), json!(3), "pack-quantized of int3 is not supported"),
        ("llama-int4-compressed", w("num_bits"), json!(null), "num_bits: is missing"),
        ("llama-int4-compressed", w("type"), json!("float"), "pack-quantized of float4 is not supported"),
        ("llama-int4-compressed", w("actorder"), json!("group"), "but weight_g_idx is missing"),
        ("schemes/int4-compressed-tensors-order", w("actorder"), json!(null), "but actorder does not declare it"),
        ("llama-int4-compressed", w("actorder"), json!("sideways"), "actorder: \"sideways\" is not supported"),
        ("llama-int4-compressed", targets.clone(), json!(["Embedding"]), "no targets of config_groups mean it"),
        ("llama-int4-compressed", targets.clone(), json!(["re:.*mlp.*"]), "no targets of config_groups mean it"),
        ("llama-int4-compressed", targets.clone(), json!(["re:(("]), "targets: \"re:((\" is no regular expression"),
        ("llama-int4-compressed", targets, json!("Linear"), "targets: is \"Linear\", not a list of texts"),
        ("llama-int4-compressed", q("ignore"), json!(["re:.*q_proj"]), "but ignore leaves it out as \"re:.*q_proj\""),
        ("llama-int4-compressed", q("ignore"), json!([Q]), "but ignore leaves it out"),
        ("llama-int4-compressed", q("ignore"), json!(["re:["]), "ignore: \"re:[\" is no regular expression"),
        ("llama-int4-compressed", q("ignore"), json!([5]), "ignore: is [5], not a list of texts"),
        ("llama-int4-compressed", q("config_groups"), json!([]), "config_groups: is [], not an object"),
        ("llama-int4-compressed", q("config_groups"), json!(null), "config_groups: is missing"),
        ("llama-int4-compressed", q("format"), json!("nvfp4-pack-quantized"), "nvfp4-pack-quantized of int4"),
        (
            "llama-int4-compressed",
            q("transform_config"),
            json!({"config_groups": {"R3": {"type": "hadamard", "apply": [{"location": "q_attn", "targets": ["re:.*"]}]}}}),
            "transform_config: transforms \"q_attn\" while the model runs",
        ),
        // FP8.
        ("llama-fp8-block", q("fmt"), json!("e5m2"), "fmt: \"e5m2\" is not supported; e4m3 is"),
        ("llama-fp8-block", q("weight_block_size"), json!([64, 64]), "blocks of 64 x 64"),
        ("llama-fp8-block", q("weight_block_size"), json!(null), "weight_scale_inv has shape"),
        ("llama-fp8-block", q("weight_block_size"), json!([128]), "weight_block_size: is [128], not [rows, columns]"),
        ("llama-fp8-block", q("weight_block_size"), json!("128"), "weight_block_size: is \"128\", not [rows, columns]"),
        ("llama-fp8-ue8m0", q("scale_fmt"), json!("e4m3"), "scale_fmt: \"e4m3\" is not supported"),
        (
            "llama-fp8-block",
            q("modules_to_not_convert"),
            json!(["q_proj"]),
            "modules_to_not_convert leaves it out as \"q_proj\"",
        ),
        ("llama-fp8-block", q("quant_method"), json!(8), "quant_method: is 8, not a text"),
        ("llama-fp8-channel", w("strategy"), json!("tensor"), "but a scale for the tensor is declared"),
        ("llama-fp8-channel", w("strategy"), json!("group"), "group_size: is missing, but the strategy is group"),
        ("llama-fp8-channel", w("strategy"), json!("block"), "block_structure: belongs to the strategy block"),
        ("llama-fp8-channel", w("num_bits"), json!(4), "float-quantized of float4 is not supported"),
        (
            "llama-fp8-channel",
            w("symmetric"),
            json!(false),
            "symmetric: is false, but float-quantized has no zero points",
        ),
        // NVFP4.
        (
            "llama-nvfp4-compressed",
            w("group_size"),
            json!(32),
            "group_size: is 32, but groups of nvfp4-pack-quantized have 16",
        ),
        (
            "llama-nvfp4-compressed",
            q("format"),
            json!("mxfp4-pack-quantized"),
            "groups of mxfp4-pack-quantized have 32",
        ),
        (
            "llama-nvfp4-compressed",
            w("strategy"),
            json!("tensor"),
            "strategy: is \"tensor\", which nvfp4-pack-quantized",
        ),
        ("llama-nvfp4-compressed", w("strategy"), json!("block"), "strategy: is \"block\", which nvfp4-pack-quantized"),
        (
            "llama-int4-compressed",
            w("strategy"),
            json!("tensor_group"),
            "\"tensor_group\", which pack-quantized does not",
        ),
        (
            "llama-fp8-channel",
            q("sparsity_config"),
            json!({"format": "sparse-24-bitmask"}),
            "sparsity_config.format: \"sparse-24-bitmask\" is not supported; dense is",
        ),
        ("llama-nvfp4-compressed", q("ignore"), json!(["re:.*self_attn"]), "ignore leaves it out"),
        ("llama-nvfp4-modelopt", q("group_size"), json!(32), "group_size: is 32, but groups of NVFP4 have 16"),
        ("llama-nvfp4-modelopt", q("quant_algo"), json!("FP8"), "which is not declared"),
        (
            "llama-nvfp4-modelopt",
            q("quant_algo"),
            json!("W4A16_AWQ"),
            "quant_algo: \"W4A16_AWQ\" of modelopt is not supported",
        ),
        ("llama-nvfp4-modelopt", q("ignore"), json!(["*self_attn*"]), "ignore leaves it out as \"*self_attn*\""),
        (
            "llama-nvfp4-modelopt",
            QUANTIZATION.into(),
            layers_of_modelopt(json!({Q: {"quant_algo": "NVFP4"}})),
            "but no targets of quantized_layers mean it",
        ),
        (
            "llama-nvfp4-modelopt",
            QUANTIZATION.into(),
            layers_of_modelopt(json!({"model.layers.*": {"quant_algo": "NVFP4"}, Q: {"quant_algo": "FP8"}})),
            "is stored as NVFP4 of ModelOpt (weight, weight_scale, weight_scale_2), which is not declared",
        ),
        (
            "llama-nvfp4-modelopt",
            QUANTIZATION.into(),
            layers_of_modelopt(json!({"*": {"quant_algo": "NVFP4"}, "model.embed_tokens": {"quant_algo": "FP8"}})),
            "without scales, but quantized_layers declares FP8 with scales",
        ),
        (
            "llama-nvfp4-modelopt",
            QUANTIZATION.into(),
            layers_of_modelopt(json!({"*": {"quant_algo": "INT3"}})),
            "quant_algo: \"INT3\" of modelopt is not supported",
        ),
        ("llama-nvfp4-modelopt", q("quant_method"), json!("modelopt_mixed"), "quant_algo: is \"NVFP4\", not MIXED"),
        (
            "llama-nvfp4-modelopt",
            QUANTIZATION.into(),
            json!(null),
            "(NVFP4 of ModelOpt), which no quantization_config declares",
        ),
        (
            "gpt_oss-mxfp4",
            q("modules_to_not_convert"),
            json!(["model.layers.*.mlp"]),
            "modules_to_not_convert leaves it out",
        ),
        // GPTQ and AWQ.
        ("llama-gptq", q("checkpoint_format"), json!("marlin"), "checkpoint_format: \"marlin\" is not supported"),
        ("llama-gptq", q("checkpoint_format"), json!("nonsense"), "checkpoint_format: \"nonsense\" is not supported"),
        ("llama-gptq", q("checkpoint_format"), json!(2), "checkpoint_format: is 2, not a text"),
        ("llama-gptq", q("is_marlin_format"), json!(true), "is_marlin_format: is not supported"),
        ("llama-gptq", q("bits"), json!(8), "GPTQ of 8 bits is not supported; 4 bits are"),
        ("llama-gptq", q("bits"), json!("4"), "bits: is \"4\", not a whole number"),
        ("llama-gptq", q("bits"), json!(null), "bits: is missing"),
        ("llama-gptq", q("w_bit"), json!(3), "bits: is 4, but w_bit is 3"),
        ("llama-gptq", q("group_size"), json!(32), "(groups of 32 are declared)"),
        ("llama-gptq", q("group_size"), json!(-1), "(groups of 128 are declared)"),
        ("llama-gptq", q("group_size"), json!(0), "in groups of 0 is not supported"),
        ("llama-gptq", q("group_size"), json!([64]), "group_size: is [64], not a whole number"),
        ("llama-gptq", q("sym"), json!(true), "GPTQ: sym is true, but the zero point of output"),
        ("llama-gptq", q("pack_dtype"), json!("int8"), "pack_dtype: \"int8\" is not supported; int32 is"),
        (
            "llama-gptq",
            q("dynamic"),
            json!({"+:.*down_proj": {"bits": 8}}),
            "dynamic.+:.*down_proj.bits: differs from that of the model",
        ),
        ("llama-gptq", q("dynamic"), json!({".*": {"group_size": 32}}), "group_size: differs from that of the model"),
        ("llama-gptq", q("dynamic"), json!({"-:.*down_proj": {}}), "but dynamic leaves it out as \"re:.*down_proj\""),
        ("llama-gptq", q("dynamic"), json!({"-:((": {}}), "dynamic: \"re:((\" is no regular expression"),
        ("llama-gptq", q("quant_method"), json!("auto-round"), "packing_format: \"\" of auto-round is not supported"),
        ("schemes/gptq-order", q("desc_act"), json!(false), "g_idx puts input feature"),
        ("llama-gptq", q("desc_act"), json!("yes"), "desc_act: is \"yes\", not true or false"),
        ("llama-awq", q("zero_point"), json!(false), "zero_point: is false, but awq is read with its zero points"),
        ("llama-awq", q("version"), json!("gemv"), "\"gemv\" of awq is not supported; gemm is"),
        ("llama-awq", q("group_size"), json!(128), "(groups of 128 are declared)"),
        ("llama-awq", q("modules_to_not_convert"), json!(["mlp"]), "modules_to_not_convert leaves it out"),
        // MLX: the block is there twice.
        ("llama-mxfp4-mlx", "quantization/bits".into(), json!(8), "quantization: differs from quantization_config"),
        (
            "llama-mxfp4-mlx",
            QUANTIZATION.into(),
            json!({"quant_method": "fp8"}),
            "quantization: differs from quantization_config",
        ),
        (
            "schemes/mlx-affine4",
            "quantization/mode".into(),
            json!("mxfp4"),
            "mxfp4 of 4 bits in groups of 64 is not supported",
        ),
        ("schemes/mlx-affine4", "quantization/mode".into(), json!(4), "quantization.mode: is 4, not a text"),
        (
            "schemes/mlx-affine4",
            "quantization/mode".into(),
            json!("log"),
            "quantization.mode: is not supported; affine",
        ),
        (
            "schemes/mlx-affine4",
            "quantization/group_size".into(),
            json!(32),
            "affine of 4 bits in groups of 32: scales has shape",
        ),
        (
            "schemes/mlx-affine4",
            "quantization/bits".into(),
            json!("4"),
            "quantization.bits: is \"4\", not a whole number",
        ),
        ("schemes/mlx-affine4", format!("quantization/{Q}"), json!(false), "has scales, but its entry is false"),
        ("schemes/mlx-affine4", format!("quantization/{Q}"), json!({"bits": 7}), "q_proj: affine of 7 bits"),
        // Nothing is quantized.
        (
            "llama-linear",
            QUANTIZATION.into(),
            json!({"quant_method": "fp8"}),
            "declares fp8, but no tensor is quantized",
        ),
        ("llama-linear", "quantization".into(), json!({"bits": 4, "group_size": 64}), "but no tensor is quantized"),
        ("llama-linear", QUANTIZATION.into(), json!([]), "quantization_config: is [], not an object"),
        ("llama-linear", QUANTIZATION.into(), json!({"a": 1}), "has neither quant_method nor bits"),
    ];
    let mut failures = Vec::new();
    for (name, key, value, expected) in cases {
        let message = with_config(name, &key, value.clone()).err().unwrap_or("accepted".into());
        let place =
            [QUANTIZATION, "quantization", "tensor model.", "config.json"].iter().any(|name| message.contains(name));
        let file = message.contains("config.json: ") || message.contains("model.safetensors: ");
        let debug = message.contains("Some(") || message.contains("None");
        if !message.contains(expected) || !place || !file || debug {
            failures.push(format!("{name}: {key} = {value}: {message:?}, not {expected:?}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn what_published_configurations_say_is_accepted() {
    let q = |key: &str| format!("{QUANTIZATION}/{key}");
    let targets = format!("{QUANTIZATION}/config_groups/group_0/targets");
    let cases = [
        (
            "llama-int4-compressed",
            q("ignore"),
            json!(["lm_head", "re:vision.*", "model.layers.99.mlp.gate", "re:^(?!.*proj).*"]),
        ),
        ("llama-int4-compressed", targets.clone(), json!(["re:.*proj"])),
        ("llama-int4-compressed", targets, json!(["Linear", "LlamaMoE"])),
        ("llama-int4-compressed", q("never_heard_of"), json!({"a": [1]})),
        ("llama-int4-compressed", format!("{WEIGHTS}/observer"), json!("minmax")),
        ("llama-int4-compressed", format!("{WEIGHTS}/actorder"), json!("weight")),
        ("llama-int4-compressed", format!("{WEIGHTS}/strategy"), json!(null)),
        (
            "llama-fp8-block",
            q("modules_to_not_convert"),
            json!(["lm_head", "model.layers.0.mlp.gate", "model.layers.0.input_layernorm"]),
        ),
        ("llama-fp8-block", q("scale_fmt"), json!("ue8m0")),
        ("llama-nvfp4-modelopt", q("ignore"), json!(["lm_head", "model.layers.9*", "*vision*"])),
        (
            "llama-nvfp4-modelopt",
            q("config_groups"),
            json!({"group_0": {"input_activations": {"dynamic": false, "num_bits": 4},
            "weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}}),
        ),
        ("llama-int4-compressed", q("transform_config"), json!({})),
        (
            "llama-int4-compressed",
            q("transform_config"),
            json!({"config_groups": {"R1": {"apply": [{"location": "weight_output"}, {"location": "weight_input"}]}}}),
        ),
        ("llama-gptq", q("checkpoint_format"), json!(null)),
        ("llama-gptq", q("sym"), json!(null)),
        ("llama-gptq", q("dynamic"), json!({})),
        ("llama-gptq", q("dynamic"), json!({"-:.*visual.*": {}, "+:.*down_proj": {"bits": 4, "group_size": 64}})),
        ("llama-gptq", q("pack_dtype"), json!("int32")),
        ("llama-gptq", QUANTIZATION.into(), auto_round("auto_round:auto_gptq")),
        ("llama-awq", QUANTIZATION.into(), auto_round("auto_round:auto_awq")),
        ("llama-fp8-block", q("quant_method"), json!("FP8")),
        ("llama-nvfp4-modelopt", q("quant_method"), json!("modelopt_fp4")),
        (
            "llama-nvfp4-modelopt",
            QUANTIZATION.into(),
            layers_of_modelopt(json!({"model.layers.*": {"quant_algo": "NVFP4", "group_size": 16},
                "model.layers.77.mlp": {"quant_algo": "FP8"}})),
        ),
        ("llama-fp8-channel", q("sparsity_config"), json!({"format": "dense", "sparsity_structure": "unstructured"})),
        ("llama-linear", QUANTIZATION.into(), json!({})),
        ("llama-awq", q("modules_to_not_convert"), json!(null)),
        ("llama-awq", q("modules_to_not_convert"), json!(["gate", "visual"])),
        ("llama-linear", QUANTIZATION.into(), json!(null)),
    ];
    for (name, key, value) in cases {
        with_config(name, &key, value.clone()).unwrap_or_else(|error| panic!("{name}: {key} = {value}: {error}"));
    }
}

fn tensor<'a>(tensors: &'a mut [Stored], ending: &str) -> &'a mut Stored {
    tensors.iter_mut().find(|tensor| tensor.name.ends_with(ending)).unwrap()
}

#[test]
fn tensors_that_contradict_the_settings_are_refused() {
    let without = |name: &str, ending: &str| {
        with_tensors(name, |tensors| tensors.retain(|tensor| !tensor.name.ends_with(ending))).unwrap_err()
    };
    let cases = [
        ("llama-int4-compressed", "q_proj.weight_zero_point", "symmetric is false, but weight_zero_point is missing"),
        ("llama-nvfp4-compressed", "q_proj.weight_global_scale", "nvfp4-pack-quantized needs weight_global_scale too"),
        ("llama-nvfp4-modelopt", "q_proj.weight_scale_2", "NVFP4 of ModelOpt needs weight_scale_2 too"),
        ("llama-nvfp4-modelopt", "q_proj.weight_scale", "NVFP4 of ModelOpt needs weight_scale too"),
        (
            "llama-fp8-block",
            "q_proj.weight_scale_inv",
            "is F8_E4M3 and cannot be decoded: FP8 with scales needs weight_scale too",
        ),
        ("llama-gptq", "q_proj.qzeros", "GPTQ needs qzeros too"),
        ("llama-awq", "q_proj.scales", "AWQ needs scales too"),
        ("schemes/gptq-order", "g_idx", "desc_act is true, but there is no g_idx"),
        ("schemes/mlx-affine4", "biases", "no biases beside affine codes"),
        ("schemes/mlx-mxfp4", "scales", "is U32 and cannot be decoded: MLX needs scales too"),
    ];
    let mut failures = Vec::new();
    for (name, ending, expected) in cases {
        let message = without(name, ending);
        if !message.contains(expected) || !message.contains("model.safetensors: tensor model.layers.0.") {
            failures.push(format!("{name} without {ending}: {message}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    let changed = |name: &str, ending: &str, change: fn(&mut Stored)| {
        with_tensors(name, |tensors| change(tensor(tensors, ending))).unwrap_err()
    };
    let bytes: fn(&mut Stored) = |tensor| tensor.dtype = "U8".into();
    let message = changed("llama-nvfp4-modelopt", "q_proj.weight_scale", bytes);
    assert!(message.contains("weight_scale is U8, not F8_E4M3"), "{message}");
    let message = changed("llama-nvfp4-compressed", "q_proj.weight_scale", bytes);
    assert!(message.contains("weight_scale is U8, not F8_E4M3"), "{message}");
    let message = changed("llama-int4-compressed", "q_proj.weight_shape", |shape| shape.data[8] += 1);
    assert!(message.contains("weight_shape is [128, 129], but weight_packed holds [128, 128]"), "{message}");
    let message = changed("llama-int4-compressed", "q_proj.weight_shape", |shape| shape.dtype = "F64".into());
    assert!(message.contains("weight_shape is F64"), "{message}");
    let message = changed("llama-int4-compressed", "q_proj.weight_zero_point", |zeros| zeros.shape = vec![8, 4]);
    assert!(message.contains("weight_zero_point has shape [8, 4], not [16, 2]"), "{message}");
    // What the settings give an entry of its own must be quantized.
    let plain = altered(
        &fixture("schemes/mlx-overrides"),
        |config| set(config, "quantization/model.norm", json!({"bits": 6, "group_size": 64})),
        |tensors| {
            tensors.push(Stored {
                name: "model.norm.weight".into(),
                dtype: "F16".into(),
                shape: vec![1],
                data: vec![0; 2],
            })
        },
    );
    let message = verdict(plain.path()).unwrap_err();
    assert!(message.contains("is F16 without scales, but its entry declares affine of 6 bits"), "{message}");
}

/// Of what stands beside a quantized weight, all must be known.
#[test]
fn companions_that_no_scheme_has_are_refused_by_name() {
    let with = |name: &str, parameter: &str, dtype: &str, of: &str| {
        with_tensors(name, |tensors| {
            let mut copy = tensor(tensors, &format!("q_proj.{of}")).clone();
            copy.name = copy.name.replace(of, parameter);
            copy.dtype = dtype.into();
            tensors.push(copy);
        })
    };
    for (name, parameter, dtype, of) in [
        ("llama-gptq", "qweight2", "I32", "qweight"),
        ("llama-gptq", "scales2", "I16", "scales"),
        ("llama-fp8-block", "weight2", "F8_E4M3", "weight"),
        ("llama-fp8-channel", "bitmask", "U8", "weight"),
        ("llama-nvfp4-modelopt", "pre_quant_scale", "U8", "weight"),
    ] {
        let message = with(name, parameter, dtype, of).unwrap_err();
        let expected = format!("model.safetensors: tensor model.layers.0.self_attn.q_proj.{parameter}: ");
        assert!(message.contains(&expected) && message.contains("is no part of what is known"), "{message}");
    }
    for parameter in ["k_scale", "input_scale", "prob_scale", "input_zero_point", "masked_bias", "rotary_emb.inv_freq"]
    {
        with("llama-fp8-block", parameter, "I8", "weight").unwrap();
    }
}

/// GPTQ stores zero points less one, its second version as they are.
#[test]
fn symmetric_zero_points_are_accepted() {
    for (format, stored) in [("gptq", 0x77), ("gptq_v2", 0x88)] {
        let declare = |config: &mut Value| {
            config[QUANTIZATION]["sym"] = json!(true);
            config[QUANTIZATION]["checkpoint_format"] = json!(format);
        };
        let zeros = |byte: u8| {
            move |tensors: &mut Vec<Stored>| {
                let zeros = tensors.iter_mut().filter(|tensor| tensor.name.ends_with("qzeros"));
                zeros.for_each(|tensor| tensor.data.fill(byte));
            }
        };
        verdict(altered(&fixture("llama-gptq"), declare, zeros(stored)).path()).unwrap();
        let message = verdict(altered(&fixture("llama-gptq"), declare, zeros(0xff - stored)).path()).unwrap_err();
        assert!(message.contains("GPTQ: sym is true, but the zero point of output 0 in group 0 is "), "{message}");
    }
}

/// Old writers put the block under another key, or into a file of its own.
#[test]
fn blocks_are_found_where_old_writers_put_them() {
    let moved = altered(
        &fixture("llama-fp8-channel"),
        |config| config["compression_config"] = config.as_object_mut().unwrap().remove(QUANTIZATION).unwrap(),
        |_| {},
    );
    verdict(moved.path()).unwrap();
    let gptq = json!({"bits": 4, "group_size": 64, "desc_act": false, "sym": false, "model_name_or_path": null});
    let awq = json!({"w_bit": 4, "q_group_size": 64, "version": "GEMM", "zero_point": true});
    for (name, file, block, bits) in
        [("llama-gptq", "quantize_config.json", gptq, "bits"), ("llama-awq", "quant_config.json", awq, "w_bit")]
    {
        let copy = altered(&fixture(name), |config| set(config, QUANTIZATION, Value::Null), |_| {});
        let write = |block: &Value| std::fs::write(copy.path().join(file), block.to_string()).unwrap();
        write(&block);
        verdict(copy.path()).unwrap();
        let mut wrong = block.clone();
        wrong[bits] = json!(3);
        write(&wrong);
        let message = verdict(copy.path()).unwrap_err();
        assert!(message.contains(&format!("{file}: bits: ")) && message.contains("of 3 bits"), "{message}");
    }
}

#[test]
fn numbers_under_two_keys_must_agree() {
    with_config("gpt_oss-mxfp4", "experts_per_token", json!(2)).unwrap();
    let message = with_config("gpt_oss-mxfp4", "experts_per_token", json!(3)).unwrap_err();
    assert!(message.contains("config.json: experts_per_token: is 3, but num_experts_per_tok is 2"), "{message}");
}

/// What nobody reads may be of any type.
#[test]
fn types_that_are_unknown_matter_where_they_are_needed() {
    let with = |name: &str| {
        with_tensors("llama", |tensors| {
            tensors.push(Stored { name: name.into(), dtype: "F8_E3M4".into(), shape: vec![3], data: vec![0; 3] });
        })
    };
    for name in ["model.vision_tower.patch.weight", "mtp.layers.0.mlp.weight", "model.layers.0.self_attn.buffer"] {
        with(name).unwrap();
    }
    for name in ["lm_head.weight", "model.layers.0.self_attn.q_proj.bias", "model.layers.0.mlp.up_proj.weight_scale"] {
        let message = with(name).unwrap_err();
        assert!(message.contains(&format!("tensor {name}: unknown dtype \"F8_E3M4\"")), "{message}");
    }
}

#[test]
fn a_file_of_modelopt_declares_too_and_must_agree() {
    let name = "llama-nvfp4-modelopt";
    let own_file = fixture(name).join("hf_quant_config.json");
    let open = |key: &str, value: Value, change: fn(&mut Value)| {
        let copy = altered(&fixture(name), |config| set(config, key, value), |_| {});
        let mut settings: Value = serde_json::from_slice(&std::fs::read(&own_file).unwrap()).unwrap();
        change(&mut settings);
        std::fs::write(copy.path().join("hf_quant_config.json"), settings.to_string()).unwrap();
        verdict(copy.path())
    };
    // Older directories have the file alone.
    open(QUANTIZATION, Value::Null, |_| {}).unwrap();
    let plain = altered(&fixture("llama-linear"), |_| {}, |_| {});
    std::fs::copy(&own_file, plain.path().join("hf_quant_config.json")).unwrap();
    let message = verdict(plain.path()).unwrap_err();
    assert!(message.contains("hf_quant_config.json: declares modelopt NVFP4, but no tensor is quantized"), "{message}");
    let cases: [(Value, fn(&mut Value), &str); 4] = [
        (json!("FP8"), |_| {}, "quantization_config: declares modelopt FP8, but "),
        (
            json!("NVFP4"),
            |own| own["quantization"]["group_size"] = json!(32),
            "hf_quant_config.json: quantization.group_size: is 32",
        ),
        (
            json!("NVFP4"),
            |own| own["quantization"]["quant_algo"] = json!("FP8"),
            "declares modelopt FP8; remove the one",
        ),
        (json!("NVFP4"), |own| *own = json!([]), "hf_quant_config.json: is [], not a JSON object"),
    ];
    for (algorithm, change, expected) in cases {
        let message = open("quantization_config/quant_algo", algorithm, change).unwrap_err();
        assert!(message.contains(expected), "{message}");
    }
}

/// Sets the first number of the first tensor with this ending.
fn with_scale(name: &str, ending: &str, value: f32) -> Result<(), String> {
    with_tensors(name, |tensors| {
        let scale = tensors.iter_mut().find(|tensor| tensor.name.ends_with(ending)).unwrap();
        match scale.dtype.as_str() {
            "F32" => scale.data[..4].copy_from_slice(&value.to_le_bytes()),
            "BF16" => scale.data[..2].copy_from_slice(&value.to_le_bytes()[2..]),
            other => panic!("{ending} is {other}"),
        }
    })
}

/// A factor that makes no number of what it belongs to. One of 0 makes zeros, except where it divides.
#[test]
fn scales_that_are_no_factors_are_refused_by_name() {
    let mut failures = Vec::new();
    for (name, ending, divides) in [
        ("llama-nvfp4-compressed", "weight_global_scale", true),
        ("llama-nvfp4-modelopt", "weight_scale_2", false),
        ("llama-fp8-channel", "weight_scale", false),
        ("llama-fp8-block", "weight_scale_inv", false),
        ("ministral3-fp8", "weight_scale_inv", false),
        ("muse_spark-nvfp4", "weight_scale_2", false),
    ] {
        let wrong = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.5].into_iter().chain(divides.then_some(0.0));
        for value in wrong {
            let message = with_scale(name, ending, value).err().unwrap_or("accepted".into());
            if !message.contains("a scale is a finite number") || !message.contains("model.safetensors: tensor ") {
                failures.push(format!("{name}: {ending} = {value}: {message}"));
            }
        }
        if !divides {
            with_scale(name, ending, 0.0).unwrap();
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    let message = with_scale("llama-nvfp4-compressed", "layers.0.mlp.up_proj.weight_global_scale", 0.0).unwrap_err();
    let expected =
        "tensor model.layers.0.mlp.up_proj.weight_global_scale: is 0 for row 0; a scale is a finite number above zero";
    assert!(message.contains(expected), "{message}");
}

#[test]
fn one_file_of_a_directory_is_not_taken_for_a_model() {
    for file in ["config.json", "model.safetensors"] {
        let path = fixture("llama").join(file);
        let expected = format!("is one file of a model; name the directory, {}", fixture("llama").display());
        let message = common::refusal(&path);
        assert!(message.contains(&expected), "{message}");
    }
}
