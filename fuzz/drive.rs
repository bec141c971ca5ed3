//! What a fuzzer does with the bytes that it makes up, shared by the fuzz targets and by the test that replays their corpora.
//! Nothing here may panic, loop for long, or take much more memory than the input has bytes.

use consort_checkpoint::Checkpoint;
use consort_checkpoint::source::MemoryFiles;

/// The bytes are a safetensors file beside a plain configuration, and one beside a quantized one.
pub fn safetensors(data: &[u8]) {
    let configurations = [
        r#"{"model_type": "llama"}"#,
        r#"{"model_type": "llama", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}"#,
        r#"{"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}"#,
        r#"{"model_type": "llama", "quantization": {"bits": 4, "group_size": 32}}"#,
        r#"{"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}"#,
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
    let config = br#"{"model_type": "llama"}"#;
    let files = [
        ("config.json", &config[..]),
        ("model.safetensors.index.json", data),
        ("generation_config.json", data),
        ("model.safetensors", weights),
    ];
    read_all(Checkpoint::open_directory(Box::new(memory(&files))));
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
