//! Generation that survives the loss of a rank, rank 0 included.

use std::ops::ControlFlow;

use consort_cluster::Replay;
use consort_cpu::Cpu;
use consort_engine::{Driver, EngineError, FinishReason, Generation, Request, Timings};

/// Continues a prompt, as [`Driver::generate`] does. What an earlier rank 0 of this run has generated of the answer is taken
/// over; random numbers depend on seed and position alone, so that what follows is what would have followed. Returns how many tokens
/// were taken over, too: the timings are those of the rest, with these as part of the prompt.
pub fn generate(
    driver: &mut Driver<Cpu>,
    replay: &mut Option<Replay>,
    request: Request,
    mut on_token: impl FnMut(u32) -> ControlFlow<()>,
) -> Result<(Generation, usize), EngineError> {
    let Some(replay) = replay else { return Ok((driver.generate(request, on_token)?, 0)) };
    let (mut tokens, is_over) = replay.begin();
    let room = driver.options().context.saturating_sub(request.prompt.len());
    let limit = request.max_tokens.map_or(room, |most| most.min(room));
    if !is_over {
        // Whether an answer that has reached its limit was seen to the end is not known: its last token comes again.
        tokens.truncate(limit.saturating_sub(1));
    }
    let known = tokens.len();
    let is_refused = tokens.iter().any(|&token| on_token(token).is_break());
    if is_over || is_refused {
        let finish_reason = match (is_refused, known < limit) {
            (true, _) => FinishReason::Cancelled,
            (false, true) => FinishReason::Stop,
            (false, false) => FinishReason::Length,
        };
        return Ok((Generation { tokens, finish_reason, timings: Timings::default() }, known));
    }
    let mut rest = request;
    rest.prompt.extend(&tokens);
    rest.max_tokens = rest.max_tokens.map(|most| most - known);
    let mut place = known;
    let generation = driver.generate(rest, |token| {
        // Before anybody sees it: what was seen is never generated a second time in another way.
        replay.note(place, token);
        place += 1;
        on_token(token)
    })?;
    tokens.extend(&generation.tokens);
    Ok((Generation { tokens, ..generation }, known))
}
