//! What groups do together where every member has a link to every other; `line` is for groups that have not. Every reduction
//! takes the members' values in member order for each element, whatever the algorithm, so that all members hold the same bits
//! and two runs give the same result.

use std::ops::Range;

use crate::FabricError;
use crate::element::{Element, Plain};
use crate::frame::{Message, Operation};
use crate::links::{Links, Step, Turn};
use crate::reduce::{Reduction, encode, reduce};

/// A group, as the collectives see it.
#[derive(Clone, Copy)]
pub(crate) struct Members<'a> {
    /// Ranks in member order.
    pub ranks: &'a [usize],
    /// This rank's place among them.
    pub position: usize,
    /// The group's identity.
    pub group: u32,
    /// Vectors up to so many bytes are reduced by sending them whole to all (one hop); longer ones are scattered and gathered.
    pub direct_bytes: usize,
}

/// Longest message that is reduced, and bounds of what all members together have on their way.
const PIECE_BYTES: usize = 512 << 10;
const PIECE_LEAST_BYTES: usize = 16 << 10;
const PIECES_BYTES: usize = 4 << 20;
/// Longest message whose length only its sender knows.
pub(crate) const MESSAGE_LIMIT: u64 = 1 << 30;

impl Members<'_> {
    pub fn message(&self, operation: Operation, bytes: usize) -> Message {
        Message { operation, group: self.group, length: bytes as u64 }
    }

    /// Positions and ranks of the other members.
    pub fn others(&self) -> impl Iterator<Item = (usize, usize)> {
        self.ranks.iter().copied().enumerate().filter(move |&(position, _)| position != self.position)
    }

    /// Bytes of each member that are reduced at a time.
    pub fn piece_bytes(&self) -> usize {
        (PIECES_BYTES / self.ranks.len()).clamp(PIECE_LEAST_BYTES, PIECE_BYTES) / 64 * 64
    }
}

/// Member `position`'s part of `total` values that are cut as evenly as possible.
fn even_part(total: usize, members: usize, position: usize) -> Range<usize> {
    let start = |position: usize| total / members * position + (total % members).min(position);
    start(position)..start(position + 1)
}

/// Member `position`'s part of values that are cut into parts of the given lengths.
pub(crate) fn listed_part(lengths: &[usize], position: usize) -> Range<usize> {
    let start: usize = lengths[..position].iter().sum();
    start..start + lengths[position]
}

/// Leaves the reduction of all values on all members. `W` is what values are on the wire.
pub(crate) fn all_reduce<V: Element, W: Element>(
    links: &mut Links,
    members: Members,
    reduction: Reduction,
    values: &mut [V],
) -> Result<(), FabricError> {
    const OPERATION: Operation = Operation::AllReduce;
    let (size, total) = (members.ranks.len(), values.len());
    if size_of_val(values) <= members.direct_bytes {
        let piece = members.piece_bytes() / size_of::<V>();
        let whole = |values: &[V]| 0..values.len();
        return values.chunks_mut(piece).try_for_each(|values| {
            let own = whole(values);
            exchange_and_reduce::<V, W>(links, members, OPERATION, reduction, values, own.clone(), |_| own.clone())
        });
    }
    let part = |position| even_part(total, size, position);
    scattered_reduce::<V, W>(links, members, OPERATION, reduction, values, part)?;
    if size_of::<W>() == size_of::<V>() {
        return gather(links, members, OPERATION, values, part);
    }
    let mut short: Vec<W> = values.iter().map(|value| W::narrow(value.widen())).collect();
    gather(links, members, OPERATION, &mut short, part)?;
    values.iter_mut().zip(short).for_each(|(value, short)| *value = V::narrow(short.widen()));
    Ok(())
}

pub(crate) fn reduce_scatter<V: Element, W: Element>(
    links: &mut Links,
    members: Members,
    values: &mut [V],
    lengths: &[usize],
) -> Result<(), FabricError> {
    let part = |position| listed_part(lengths, position);
    scattered_reduce::<V, W>(links, members, Operation::ReduceScatter, Reduction::Sum, values, part)
}

pub(crate) fn all_gather<T: Plain>(
    links: &mut Links,
    members: Members,
    values: &mut [T],
    lengths: &[usize],
) -> Result<(), FabricError> {
    gather(links, members, Operation::AllGather, values, |position| listed_part(lengths, position))
}

/// Leaves each member its part reduced.
fn scattered_reduce<V: Element, W: Element>(
    links: &mut Links,
    members: Members,
    operation: Operation,
    reduction: Reduction,
    values: &mut [V],
    part: impl Fn(usize) -> Range<usize>,
) -> Result<(), FabricError> {
    let piece = members.piece_bytes() / size_of::<V>();
    let longest = (0..members.ranks.len()).map(|position| part(position).len()).max().unwrap_or(0);
    for start in (0..longest).step_by(piece) {
        // Each member's part is cut into the same pieces; a shorter part runs out of them earlier.
        let piece_of = |position: usize| {
            let part = part(position);
            let at = |offset: usize| (part.start + offset).min(part.end);
            at(start)..at(start + piece)
        };
        let own = piece_of(members.position);
        exchange_and_reduce::<V, W>(links, members, operation, reduction, values, own, piece_of)?;
    }
    Ok(())
}

/// Sends every other member the values that it is to have, and reduces what all send for this member's `own` values, as it comes.
fn exchange_and_reduce<V: Element, W: Element>(
    links: &mut Links,
    members: Members,
    operation: Operation,
    reduction: Reduction,
    values: &mut [V],
    own: Range<usize>,
    outgoing: impl Fn(usize) -> Range<usize>,
) -> Result<(), FabricError> {
    let (size, width) = (members.ranks.len(), size_of::<W>());
    for (position, rank) in members.others() {
        let theirs = outgoing(position).len();
        if theirs > 0 {
            links.begin_send(rank, members.message(operation, theirs * width));
        }
        if !own.is_empty() {
            links.begin_receive(rank, members.message(operation, own.len() * width));
        }
    }
    // Values that go out are not changed before they have gone, unless a copy goes.
    let mut encoded = std::mem::take(&mut links.encoded);
    let copied = width != size_of::<V>();
    // Either all get the same values, or each gets its own.
    let stride =
        if size > 1 && outgoing(0) == outgoing(1) { 0 } else { members.piece_bytes() / size_of::<V>() * width };
    if copied {
        encoded.resize(members.piece_bytes().max(size * stride), 0);
        for position in (0..size).filter(|&position| stride > 0 || position == 0) {
            encode::<V, W>(&values[outgoing(position)], &mut encoded[position * stride..]);
        }
    }
    let overwrites =
        |position: usize| !copied && outgoing(position).start < own.end && own.start < outgoing(position).end;
    let mut done = 0;
    let result = links.drive(operation, members.ranks, false, |table, _| {
        let (mut moved, mut waiting_for, mut ready, mut free) = (false, None, usize::MAX, own.len());
        for (position, rank) in members.others() {
            let link = table.get_mut(rank);
            let part = outgoing(position);
            let payload = match copied {
                true => &encoded[position * stride..][..part.len() * width],
                false => &V::bytes(values)[part.start * width..part.end * width],
            };
            let steps = link.send_step(payload).and_then(|sent| Ok(sent | link.stage_step()?));
            moved |= steps.map_err(|fault| (rank, fault))?;
            if overwrites(position) {
                free = free.min(link.sent_prefix(payload.len()) / width);
            }
            let staged = link.staged().len() / width;
            if staged < ready && done + staged < own.len() || waiting_for.is_none() && link.is_sending() {
                waiting_for = Some(rank);
            }
            ready = ready.min(staged);
        }
        let count = ready.min(free.saturating_sub(done)).min(own.len() - done);
        if count > 0 {
            let theirs = |position: usize| &table.get(members.ranks[position]).staged()[..count * width];
            let target = &mut values[own.start + done..][..count];
            reduce::<V, W>(reduction, target, members.position, size, theirs);
            for (_, rank) in members.others() {
                table.with(rank, |link| link.take_staged(count * width))?;
            }
            done += count;
            moved = true;
        }
        let sending = members.others().find(|&(_, rank)| table.get(rank).is_sending()).map(|(_, rank)| rank);
        let all = done == own.len();
        let anyone = members.others().next().map(|(_, rank)| rank);
        Ok(Turn { moved, waiting_for: if all { sending } else { waiting_for.or(sending).or(anyone) } })
    });
    links.encoded = encoded;
    result
}

/// Every member's part to all.
fn gather<T: Plain>(
    links: &mut Links,
    members: Members,
    operation: Operation,
    values: &mut [T],
    part: impl Fn(usize) -> Range<usize>,
) -> Result<(), FabricError> {
    let own = part(members.position);
    for (position, rank) in members.others() {
        links.begin_send(rank, members.message(operation, own.len() * size_of::<T>()));
        links.begin_receive(rank, members.message(operation, part(position).len() * size_of::<T>()));
    }
    links.drive_each(operation, members.ranks, false, |position, link| {
        let sent = link.send_step(T::bytes(&values[own.clone()]))?;
        let received = link.receive_step(T::bytes_mut(&mut values[part(position)]))?;
        Ok(Step::of(link, sent || received))
    })
}

/// A part of `outgoing` to each member, and a part of `incoming` from each.
pub(crate) fn all_to_all<T: Plain>(
    links: &mut Links,
    members: Members,
    (outgoing, outgoing_lengths): (&[T], &[usize]),
    (incoming, incoming_lengths): (&mut [T], &[usize]),
) -> Result<(), FabricError> {
    const OPERATION: Operation = Operation::AllToAll;
    let sent = |position| listed_part(outgoing_lengths, position);
    let received = |position| listed_part(incoming_lengths, position);
    incoming[received(members.position)].copy_from_slice(&outgoing[sent(members.position)]);
    for (position, rank) in members.others() {
        links.begin_send(rank, members.message(OPERATION, outgoing_lengths[position] * size_of::<T>()));
        links.begin_receive(rank, members.message(OPERATION, incoming_lengths[position] * size_of::<T>()));
    }
    links.drive_each(OPERATION, members.ranks, false, |position, link| {
        let moved = link.send_step(T::bytes(&outgoing[sent(position)]))?;
        let came = link.receive_step(T::bytes_mut(&mut incoming[received(position)]))?;
        Ok(Step::of(link, moved || came))
    })
}
pub(crate) fn broadcast(
    links: &mut Links,
    members: Members,
    root: usize,
    message: &mut Vec<u8>,
    idle: bool,
) -> Result<(), FabricError> {
    const OPERATION: Operation = Operation::Broadcast;
    if members.position != root {
        return receive_message(links, members, OPERATION, root, message, idle);
    }
    check_length(message)?;
    for (_, rank) in members.others() {
        links.begin_send(rank, members.message(OPERATION, message.len()));
    }
    links.drive_each(OPERATION, members.ranks, false, |_, link| {
        let moved = link.send_step(message)?;
        Ok(Step::of(link, moved))
    })
}

/// Every member's message, of any length, to all; in member order.
pub(crate) fn exchange(
    links: &mut Links,
    members: Members,
    message: &[u8],
    idle: bool,
) -> Result<Vec<Vec<u8>>, FabricError> {
    const OPERATION: Operation = Operation::AllGather;
    check_length(message)?;
    for (_, rank) in members.others() {
        links.begin_send(rank, members.message(OPERATION, message.len()));
        links.begin_receive(rank, members.message(OPERATION, 0));
    }
    let mut messages: Vec<Vec<u8>> = vec![Vec::new(); members.ranks.len()];
    let mut length_known = vec![false; members.ranks.len()];
    links.drive_each(OPERATION, members.ranks, idle, |position, link| {
        let mut moved = link.send_step(message)?;
        let theirs = &mut messages[position];
        if !length_known[position]
            && let Some(length) = link.learn_length(MESSAGE_LIMIT)?
        {
            theirs.resize(length as usize, 0);
            length_known[position] = true;
        }
        if length_known[position] {
            moved |= link.receive_step(theirs)?;
        }
        Ok(Step::of(link, moved))
    })?;
    messages[members.position] = message.to_vec();
    Ok(messages)
}

pub(crate) fn send_bytes(links: &mut Links, members: Members, to: usize, message: &[u8]) -> Result<(), FabricError> {
    check_length(message)?;
    send_message(links, members, to, message)
}

pub(crate) fn recv_bytes(
    links: &mut Links,
    members: Members,
    from: usize,
    message: &mut Vec<u8>,
) -> Result<(), FabricError> {
    receive_message(links, members, Operation::PointToPoint, from, message, false)
}

pub(crate) fn check_length(message: &[u8]) -> Result<(), FabricError> {
    let length = message.len();
    if length as u64 <= MESSAGE_LIMIT {
        return Ok(());
    }
    Err(FabricError::Invalid(format!("a message of {length} bytes is longer than {MESSAGE_LIMIT}")))
}

fn send_message(links: &mut Links, members: Members, to: usize, payload: &[u8]) -> Result<(), FabricError> {
    let rank = members.ranks[to];
    links.begin_send(rank, members.message(Operation::PointToPoint, payload.len()));
    links.drive_each(Operation::PointToPoint, &[rank], false, |_, link| {
        let moved = link.send_step(payload)?;
        Ok(Step::of(link, moved))
    })
}

/// Receives a message whose length only its sender knows.
fn receive_message(
    links: &mut Links,
    members: Members,
    operation: Operation,
    from: usize,
    message: &mut Vec<u8>,
    idle: bool,
) -> Result<(), FabricError> {
    let rank = members.ranks[from];
    links.begin_receive(rank, members.message(operation, 0));
    let mut length_known = false;
    links.drive_each(operation, &[rank], idle, |_, link| {
        if !length_known {
            let Some(length) = link.learn_length(MESSAGE_LIMIT)? else { return Ok(Step::Stuck) };
            message.resize(length as usize, 0);
            length_known = true;
        }
        let moved = link.receive_step(message)?;
        Ok(Step::of(link, moved))
    })
}

pub(crate) fn barrier(links: &mut Links, members: Members, idle: bool) -> Result<(), FabricError> {
    let message = members.message(Operation::Barrier, 0);
    for (_, rank) in members.others() {
        links.begin_send(rank, message);
        links.begin_receive(rank, message);
    }
    links.drive_each(Operation::Barrier, members.ranks, idle, |_, link| {
        let moved = link.send_step(&[])? | link.receive_step(&mut [])?;
        Ok(Step::of(link, moved))
    })
}

pub(crate) fn send<T: Plain>(links: &mut Links, members: Members, to: usize, values: &[T]) -> Result<(), FabricError> {
    send_message(links, members, to, T::bytes(values))
}

pub(crate) fn recv<T: Plain>(
    links: &mut Links,
    members: Members,
    from: usize,
    values: &mut [T],
) -> Result<(), FabricError> {
    let rank = members.ranks[from];
    links.begin_receive(rank, members.message(Operation::PointToPoint, size_of_val(values)));
    links.drive_each(Operation::PointToPoint, &[rank], false, |_, link| {
        let moved = link.receive_step(T::bytes_mut(values))?;
        Ok(Step::of(link, moved))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_parts_cover_everything_once() {
        for (total, members) in [(0, 1), (1, 2), (7, 3), (64, 64), (63, 64), (1 << 20, 5)] {
            let mut end = 0;
            for position in 0..members {
                let part = even_part(total, members, position);
                assert_eq!(part.start, end);
                assert!(part.len().abs_diff(total / members) <= 1);
                end = part.end;
            }
            assert_eq!(end, total);
        }
    }
}
