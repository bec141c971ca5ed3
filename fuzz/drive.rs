//! What a fuzzer does with the bytes that it makes up, shared by the fuzz targets and by the test that replays their corpora.
//! Nothing here may panic, loop for long, or take much more memory than the input has bytes.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use consort_checkpoint::Checkpoint;
use consort_checkpoint::chat::{ChatTemplate, Conversation};
use consort_checkpoint::gguf::Value;
use consort_checkpoint::source::MemoryFiles;
use consort_checkpoint::tokenizer::Tokenizer;
use serde_json::{Map, json};

/// The bytes are a safetensors file beside a plain configuration, and one beside a quantized one.
pub fn safetensors(data: &[u8]) {
    let configurations = [
        r#"{"model_type": "llama"}"#,
        r#"{"model_type": "llama", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}"#,
        r#"{"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}"#,
        r#"{"model_type": "llama", "quantization": {"bits": 4, "group_size": 32}}"#,
        r#"{"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}"#,
        r#"{"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": true}}"#,
        r#"{"model_type": "llama", "quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}}}}"#,
    ];
    for config in configurations {
        let files = [("config.json", config.as_bytes()), ("model.safetensors", data)];
        read_all(Checkpoint::open_directory(Box::new(memory(&files))));
    }
}

/// The bytes are a GGUF file.
pub fn gguf(data: &[u8]) {
    read_all(Checkpoint::open_gguf(Box::new(memory(&[("model.gguf", data)]))));
}

/// The bytes are a `config.json` beside weights in several schemes, and an index.
pub fn config(data: &[u8]) {
    let weights = include_bytes!("weights.safetensors");
    read_all(Checkpoint::open_directory(Box::new(memory(&[("config.json", data), ("model.safetensors", weights)]))));
    let files = [("params.json", data), ("consolidated.safetensors", weights)];
    read_all(Checkpoint::open_directory(Box::new(memory(&files))));
    let config = br#"{"model_type": "llama"}"#;
    let files = [
        ("config.json", &config[..]),
        ("model.safetensors.index.json", data),
        ("generation_config.json", data),
        ("model.safetensors", weights),
    ];
    read_all(Checkpoint::open_directory(Box::new(memory(&files))));
}

/// The bytes are a chat template.
pub fn template(data: &[u8]) {
    static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
        let texts = |texts: &[&str]| Value::Array(texts.iter().map(|text| Value::String(text.to_string())).collect());
        let entries = [
            ("model", Value::String("gpt2".into())),
            ("pre", Value::String("gpt-2".into())),
            ("tokens", texts(&["a", "b", "<|im_start|>", "<|im_end|>"])),
            ("token_type", Value::Array([1, 1, 3, 3].map(Value::I32).to_vec())),
            ("merges", texts(&[])),
        ];
        let metadata = entries.map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)).into();
        // INVARIANT: the metadata above is that of a tokenizer.
        Tokenizer::from_gguf(&metadata, "fuzz").expect("a small vocabulary")
    });
    let source = String::from_utf8_lossy(data).into_owned();
    let Ok(Some(template)) = ChatTemplate::new(BTreeMap::from([("default".to_owned(), source)]), "fuzz") else {
        return;
    };
    let messages = [
        json!({"role": "system", "content": "s"}),
        json!({"role": "user", "content": "hello <|im_end|>"}),
        json!({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{\"n\": 1}"}}]}),
    ];
    let tools = [json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}})];
    let variables = Map::new();
    let conversation =
        Conversation { messages: &messages, tools: &tools, add_generation_prompt: true, variables: &variables };
    let _ = template.encode(&TOKENIZER, &conversation);
}

/// The bytes are a `tokenizer.json`.
pub fn tokenizer(data: &[u8]) {
    let Ok(tokenizer) = Tokenizer::from_json(data, "fuzz") else { return };
    for text in ["", "a b  c\n", "é😀", "<s>a</s> <x>"] {
        for special in [true, false] {
            let Ok(ids) = tokenizer.encode_prompt(text, special) else { continue };
            tokenizer.decode(&ids);
        }
    }
}

fn memory(files: &[(&str, &[u8])]) -> MemoryFiles {
    MemoryFiles::new(files.iter().map(|(name, bytes)| (name.to_string(), bytes.to_vec())))
}

fn read_all<E>(checkpoint: Result<Checkpoint, E>) {
    let Ok(checkpoint) = checkpoint else { return };
    for tensor in checkpoint.tensors() {
        let _ = checkpoint.read_f32(&tensor.name);
    }
}
