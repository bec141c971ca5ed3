//! What a run has generated so far, so that it can go on after a loss: rank 0 tells its launcher of every token, and a rank 0 that
//! is started again is told of all of them.
//!
//! The launcher is the one process of a run that no rank's death takes along, so the tokens live there. They come as lines of
//! rank 0's standard error that begin with a control character, which reach the launcher from other machines too and which it
//! keeps to itself.

use std::io::Write;

/// What a line begins with that tells of a token: the generation's number, the token's place in it, and its id follow.
const RECORD: &str = "\u{1e}token ";

/// The launcher's side: the tokens of each generation, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Journal {
    generations: Vec<Vec<u32>>,
}

impl Journal {
    /// Takes note of a line, if it is a record. One that does not follow what is known (a line before it was lost) is worth
    /// nothing, and neither is what comes after it.
    pub fn note(&mut self, line: &str) -> bool {
        let Some(record) = line.strip_prefix(RECORD) else { return false };
        let numbers: Vec<u32> = record.split(' ').filter_map(|number| number.parse().ok()).collect();
        if let [generation, place, token] = numbers[..] {
            if generation as usize == self.generations.len() && place == 0 {
                self.generations.push(Vec::new());
            }
            if let Some(tokens) = self.generations.get_mut(generation as usize)
                && tokens.len() == place as usize
            {
                tokens.push(token);
            }
        }
        true
    }

    /// One line, for the control channel.
    pub fn encode(&self) -> String {
        let lists =
            self.generations.iter().map(|tokens| tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(","));
        lists.collect::<Vec<_>>().join(";") + "\n"
    }

    pub fn decode(line: &str) -> Self {
        let list = |text: &str| text.split(',').filter_map(|id| id.parse().ok()).collect();
        let generations = line.trim_end().split(';').filter(|text| !text.is_empty()).map(list).collect();
        Self { generations }
    }

    /// Tokens of the generation that is not known to be over.
    pub fn unfinished_tokens(&self) -> usize {
        self.generations.last().map_or(0, Vec::len)
    }
}

/// Whether a line of a rank's standard error is for the launcher alone.
pub(crate) fn is_record(line: &str) -> bool {
    line.starts_with(RECORD)
}

/// Rank 0's side: what an earlier rank 0 of this run has generated, and where this one's tokens are told of.
#[derive(Clone, Debug)]
pub struct Replay {
    known: Journal,
    /// The current generation, from 0; none before the first.
    generation: Option<usize>,
    /// Tokens of the current generation that were told of.
    told: usize,
}

impl Replay {
    pub(crate) fn new(known: Journal) -> Self {
        Self { known, generation: None, told: 0 }
    }

    /// Begins the next generation. Returns the tokens of it that are known already, and whether these are all of it, since another
    /// one followed.
    pub fn begin(&mut self) -> (Vec<u32>, bool) {
        let generation = self.generation.map_or(0, |generation| generation + 1);
        self.generation = Some(generation);
        let known = self.known.generations.get(generation).cloned().unwrap_or_default();
        self.told = known.len();
        (known, generation + 1 < self.known.generations.len())
    }

    /// Tells of the `place`th token of the current generation, from 0, unless it is known.
    pub fn note(&mut self, place: usize, token: u32) {
        if place >= self.told {
            self.told = place + 1;
            let generation = self.generation.unwrap_or(0);
            // Whole lines in one call, so that no other line can get into it. A launcher that is gone needs no record.
            let _ = std::io::stderr().write_all(format!("{RECORD}{generation} {place} {token}\n").as_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_is_known_again() {
        let mut journal = Journal::default();
        for line in
            ["token 0 0 5", "token 0 1 6", "token 0 3 9", "token 0 2 7", "token 1 0 8", "token 3 0 1", "token x"]
        {
            assert!(journal.note(&format!("\u{1e}{line}")));
        }
        assert!(!journal.note("token 1 1 4"), "a line of text is none");
        assert_eq!(journal.generations, [vec![5, 6, 7], vec![8]], "what does not follow is left out");
        assert_eq!(Journal::decode(&journal.encode()), journal);
        assert_eq!(Journal::decode("\n"), Journal::default());
        let mut replay = Replay::new(journal);
        assert_eq!(
            [replay.begin(), replay.begin(), replay.begin()],
            [(vec![5, 6, 7], true), (vec![8], false), (vec![], false)]
        );
    }
}
