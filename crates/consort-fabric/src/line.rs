//! Collectives of groups in which each member has a link to the one before and the one after, such as a ring of cables.
//!
//! A reduction must add the members' values in member order. So partial results go up the line, from the first member to the last, and
//! totals come down again, in pieces that are all on their way at once. Each direction of each link carries the vector once, which
//! is what the busiest link of a ring cannot avoid by more than the share of one member.

use std::ops::Range;

use half::bf16;

use crate::FabricError;
use crate::collective::{MESSAGE_LIMIT, Members, check_length, listed_part};
use crate::element::{Element, Plain};
use crate::fabric::Wire;
use crate::frame::{Message, Operation};
use crate::link::{Link, LinkFault};
use crate::links::{Cost, LinkTable, Links, RankFault, Turn};
use crate::reduce::{self, Reduction};

/// Bytes that travel as one message: small enough that a long vector keeps the whole line busy.
const PIECE_BYTES: usize = 128 << 10;

/// One direction of one link, along which pieces of a buffer travel one after another.
struct Stream {
    /// The neighbour; none at the end of the line.
    rank: Option<usize>,
    /// Pieces that are through.
    done: usize,
    /// Whether the piece after them is on its way.
    open: bool,
}

impl Stream {
    fn new(rank: Option<usize>) -> Self {
        Self { rank, done: 0, open: false }
    }

    /// Moves on while there are pieces below `limit`: `begin` starts one, `step` moves it and says whether anything moved and
    /// whether it is through. Returns whether anything moved.
    fn advance(
        &mut self,
        table: &mut LinkTable,
        limit: usize,
        mut begin: impl FnMut(&mut Link, usize),
        mut step: impl FnMut(&mut Link, usize) -> Result<(bool, bool), LinkFault>,
    ) -> Result<bool, RankFault> {
        let Some(rank) = self.rank else {
            self.done = limit;
            return Ok(false);
        };
        let mut any = false;
        while self.done < limit {
            if !std::mem::replace(&mut self.open, true) {
                begin(table.get_mut(rank), self.done);
            }
            let (moved, through) = table.with(rank, |link| step(link, self.done))?;
            any |= moved;
            if !through {
                break;
            }
            (self.done, self.open) = (self.done + 1, false);
        }
        Ok(any)
    }

    /// Sends the pieces below `limit`. The piece `at` lies at `range(at)` of `buffer`, in bytes, and is announced as `message`.
    fn send(
        &mut self,
        table: &mut LinkTable,
        cost: &mut Cost,
        limit: usize,
        message: impl Fn(Range<usize>) -> Message,
        range: impl Fn(usize) -> Range<usize>,
        buffer: &[u8],
    ) -> Result<bool, RankFault> {
        self.advance(
            table,
            limit,
            |link, at| {
                cost.count(message(range(at)));
                link.begin_send(message(range(at)));
            },
            |link, at| Ok((link.send_step(&buffer[range(at)])?, !link.is_sending())),
        )
    }

    /// Receives the pieces below `limit`, as [`Stream::send`] sends them.
    fn receive(
        &mut self,
        table: &mut LinkTable,
        limit: usize,
        message: impl Fn(Range<usize>) -> Message,
        range: impl Fn(usize) -> Range<usize>,
        buffer: &mut [u8],
    ) -> Result<bool, RankFault> {
        self.advance(
            table,
            limit,
            |link, at| link.begin_receive(message(range(at))),
            |link, at| Ok((link.receive_step(&mut buffer[range(at)])?, !link.is_receiving())),
        )
    }

    /// The neighbour, while fewer than `pieces` are through.
    fn waits_for(&self, pieces: usize) -> Option<usize> {
        self.rank.filter(|_| self.done < pieces)
    }
}

/// The bytes of piece `at` of `total`.
fn piece_of(total: usize, at: usize) -> Range<usize> {
    (at * PIECE_BYTES).min(total)..((at + 1) * PIECE_BYTES).min(total)
}

fn neighbours(members: Members) -> (Option<usize>, Option<usize>) {
    let at = |position: Option<usize>| position.and_then(|position| members.ranks.get(position).copied());
    (at(members.position.checked_sub(1)), at(Some(members.position + 1)))
}

/// Leaves the reduction of all values on all members. Partial results travel in f32, whatever the kind of the values.
pub(crate) fn reduce<T: Element>(
    links: &mut Links,
    members: Members,
    operation: Operation,
    reduction: Reduction,
    values: &mut [T],
) -> Result<(), FabricError> {
    let mut wide: Vec<f32> = values.iter().map(|value| value.widen()).collect();
    if links.wire == Wire::Bf16 {
        wide.iter_mut().for_each(|value| *value = bf16::narrow(*value).widen());
    }
    up_and_down(links, members, operation, reduction, &mut wide, false)?;
    values.iter_mut().zip(wide).for_each(|(value, wide)| *value = T::narrow(wide));
    Ok(())
}

/// Returns when all have come.
pub(crate) fn barrier(links: &mut Links, members: Members, idle: bool) -> Result<(), FabricError> {
    up_and_down(links, members, Operation::Barrier, Reduction::Sum, &mut [], idle)
}

fn up_and_down(
    links: &mut Links,
    members: Members,
    operation: Operation,
    reduction: Reduction,
    values: &mut [f32],
    idle: bool,
) -> Result<(), FabricError> {
    const WIDTH: usize = size_of::<f32>();
    let total = size_of_val(values);
    // Without values, one empty piece goes up and down: nobody leaves before all have come.
    let pieces = total.div_ceil(PIECE_BYTES).max(1);
    let range = |at: usize| piece_of(total, at);
    let message = |range: Range<usize>| members.message(operation, range.len());
    let (below, above) = neighbours(members);
    let [mut up_in, mut up_out, mut down_in, mut down_out] = [below, above, above, below].map(Stream::new);
    let mut reduced = 0;
    links.drive(operation, members.ranks, idle, |table, cost| {
        let mut moved = up_in.advance(
            table,
            pieces,
            |link, at| link.begin_receive(message(range(at))),
            |link, at| {
                // What comes from below is the sum of all lower members; this one's values are next in order.
                let moved = link.stage_step()?;
                let count = link.staged().len() / WIDTH;
                let target = &mut values[range(at).start / WIDTH + reduced..][..count];
                reduce::reduce::<f32, f32>(reduction, target, 1, 2, |_| &link.staged()[..count * WIDTH]);
                link.take_staged(count * WIDTH)?;
                reduced += count;
                let through = reduced * WIDTH == range(at).len() && !link.is_receiving();
                if through {
                    reduced = 0;
                }
                Ok((moved, through))
            },
        )?;
        moved |= up_out.send(table, cost, up_in.done, message, range, f32::bytes(values))?;
        // A total comes back only after this member's part has gone up.
        moved |= down_in.receive(table, up_out.done, message, range, f32::bytes_mut(values))?;
        moved |= down_out.send(table, cost, down_in.done, message, range, f32::bytes(values))?;
        let waiting_for =
            [&up_in, &up_out, &down_in, &down_out].into_iter().find_map(|stream| stream.waits_for(pieces));
        Ok(Turn { moved, waiting_for })
    })
}

/// Every member's part to all: each passes on what comes from one neighbour to the other.
pub(crate) fn all_gather<T: Plain>(
    links: &mut Links,
    members: Members,
    values: &mut [T],
    lengths: &[usize],
) -> Result<(), FabricError> {
    const OPERATION: Operation = Operation::AllGather;
    let (position, size) = (members.position, members.ranks.len());
    // A piece is a member's part. Upwards come the parts of all lower members, the nearest first; downwards those of all higher ones.
    let part = |member: usize| {
        let part = listed_part(lengths, member);
        part.start * size_of::<T>()..part.end * size_of::<T>()
    };
    let message = |range: Range<usize>| members.message(OPERATION, range.len());
    let (below, above) = neighbours(members);
    let [mut up_in, mut up_out, mut down_in, mut down_out] = [below, above, above, below].map(Stream::new);
    let (lower, higher) = (position, size - 1 - position);
    links.drive(OPERATION, members.ranks, false, |table, cost| {
        let from_below = |at: usize| part(position - 1 - at);
        let from_above = |at: usize| part(position + 1 + at);
        let mut moved = up_in.receive(table, lower, message, from_below, T::bytes_mut(values))?;
        moved |= down_in.receive(table, higher, message, from_above, T::bytes_mut(values))?;
        // This member's own part first, then what has come.
        moved |= up_out.send(table, cost, up_in.done + 1, message, |at| part(position - at), T::bytes(values))?;
        moved |= down_out.send(table, cost, down_in.done + 1, message, |at| part(position + at), T::bytes(values))?;
        let outgoing = up_out.waits_for(lower + 1).or(down_out.waits_for(higher + 1));
        Ok(Turn { moved, waiting_for: up_in.waits_for(lower).or(down_in.waits_for(higher)).or(outgoing) })
    })
}

/// A message of the root to all, its length first.
pub(crate) fn broadcast(
    links: &mut Links,
    members: Members,
    root: usize,
    message: &mut Vec<u8>,
    idle: bool,
) -> Result<(), FabricError> {
    let mut length = (message.len() as u64).to_le_bytes();
    check_length(message)?;
    relay(links, members, Operation::Broadcast, root, &mut length, idle)?;
    message.resize(received_length(length)?, 0);
    relay(links, members, Operation::Broadcast, root, message, false)
}

fn received_length(length: [u8; 8]) -> Result<usize, FabricError> {
    match u64::from_le_bytes(length) {
        length if length <= MESSAGE_LIMIT => Ok(length as usize),
        length => Err(FabricError::Invalid(format!("a message of {length} bytes was announced, which is too long"))),
    }
}

/// `buffer` travels from member `root` to both ends of the line. All know its length.
fn relay(
    links: &mut Links,
    members: Members,
    operation: Operation,
    root: usize,
    buffer: &mut [u8],
    idle: bool,
) -> Result<(), FabricError> {
    let total = buffer.len();
    let pieces = total.div_ceil(PIECE_BYTES);
    let range = |at: usize| piece_of(total, at);
    let message = |range: Range<usize>| members.message(operation, range.len());
    let (below, above) = neighbours(members);
    let (from, to) = match members.position.cmp(&root) {
        std::cmp::Ordering::Less => (above, [below, None]),
        std::cmp::Ordering::Equal => (None, [below, above]),
        std::cmp::Ordering::Greater => (below, [above, None]),
    };
    let (mut incoming, mut outgoing) = (Stream::new(from), to.map(Stream::new));
    links.drive(operation, members.ranks, idle, |table, cost| {
        let mut moved = incoming.receive(table, pieces, message, range, buffer)?;
        for stream in &mut outgoing {
            moved |= stream.send(table, cost, incoming.done, message, range, buffer)?;
        }
        let waiting_for = incoming.waits_for(pieces).or(outgoing.iter().find_map(|stream| stream.waits_for(pieces)));
        Ok(Turn { moved, waiting_for })
    })
}
