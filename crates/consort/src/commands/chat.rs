//! `consort chat`: a conversation on the terminal, one line each.

use std::io::{self, IsTerminal};
use std::ops::ControlFlow;

use anyhow::Result;
use clap::Args;
use consort_cluster::{ControlChannel, Input};
use consort_engine::Request;
use serde_json::{Value, json};

use crate::flags::{RunFlags, SamplingFlags};
use crate::invocation::Invocation;
use crate::resume::generate;
use crate::{output, run};

#[derive(Args)]
pub struct Chat {
    /// A path, a known name (smollm2) or a name on the Hugging Face Hub (ORG/NAME)
    #[arg(short, long)]
    model: String,
    /// What the model is told before the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Most tokens of an answer [default: what the context holds]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: Option<u32>,
    #[command(flatten)]
    sampling: SamplingFlags,
    #[command(flatten)]
    run: RunFlags,
}

impl Chat {
    pub fn run(&self, invocation: &Invocation) -> Result<()> {
        let prepared = run::start(invocation, &self.model, &self.run, Input::ToRankZero, |model, _| {
            // A model without a template is refused before it is loaded.
            model.encode_chat(&[json!({"role": "user", "content": "Hello"})])?;
            self.sampling.sampling()
        })?;
        let Some((mut session, sampling)) = prepared else { return Ok(()) };

        let end_tokens = session.model.end_tokens()?;
        let system = self.system.iter().map(|text| json!({"role": "system", "content": text}));
        let beginning: Vec<Value> = system.collect();
        let mut messages = beginning.clone();
        let mut shown = Ok(());
        eprintln!("Type a line and press Enter. /clear forgets the conversation, Ctrl-D ends it.");
        while let Some(line) = next_line(invocation)? {
            match line.trim() {
                "" => continue,
                "/clear" => {
                    messages.clone_from(&beginning);
                    continue;
                }
                text => messages.push(json!({"role": "user", "content": text})),
            }
            let prompt = session.model.encode_chat(&messages)?;
            if let Err(error) = session.driver.options().check_prompt(&session.model.outline, &prompt) {
                eprintln!("{error}; /clear begins anew");
                messages.pop();
                continue;
            }
            let mut decoder = session.model.tokenizer()?.continuation_decoder();
            let mut answer = String::new();
            let mut printed = Ok(());
            let max_tokens = self.max_tokens.map(|tokens| tokens as usize);
            let request = Request { prompt, max_tokens, end_tokens: end_tokens.clone(), sampling };
            generate(&mut session.driver, &mut session.replay, request, |token| {
                let piece = decoder.push(token);
                printed = output::text(&piece);
                answer.push_str(&piece);
                if printed.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            })?;
            let rest = decoder.finish();
            answer.push_str(&rest);
            shown = printed.and_then(|()| output::text(&format!("{rest}\n")));
            if shown.is_err() {
                break;
            }
            messages.push(json!({"role": "assistant", "content": answer}));
        }
        // The other ranks end in order even if nobody reads the answers any more.
        session.finish()?;
        Ok(shown?)
    }
}

/// What the user types next, from the launcher or from this process's own standard input; `None` at the end.
fn next_line(invocation: &Invocation) -> Result<Option<String>> {
    let terminal = invocation.control.as_ref().map_or_else(|| io::stdout().is_terminal(), ControlChannel::is_terminal);
    if terminal {
        output::text("> ")?;
    }
    if let Some(control) = &invocation.control {
        return Ok(control.next_line());
    }
    let mut line = Vec::new();
    let count = io::BufRead::read_until(&mut io::stdin().lock(), b'\n', &mut line)?;
    Ok((count > 0).then(|| String::from_utf8_lossy(&line).into_owned()))
}
