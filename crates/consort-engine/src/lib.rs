//! A rank at work: KV cache, scheduler, step log, sampler, generation.
