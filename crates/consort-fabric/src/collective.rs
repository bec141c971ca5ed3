//! What groups do together. Every sum adds the members' values in member order for each element, whatever the algorithm, so
//! that all members hold the same bits and two runs give the same result.

use std::ops::Range;

use crate::FabricError;
use crate::frame::{Message, Operation};
use crate::links::{Links, Step};

/// A group, as the collectives see it.
#[derive(Clone, Copy)]
pub(crate) struct Members<'a> {
    /// Ranks in member order.
    pub ranks: &'a [usize],
    /// This rank's place among them.
    pub position: usize,
    /// The group's identity.
    pub group: u32,
}

/// Up to this many values, every member sends all its values to all others (one hop); above, reduce-scatter and all-gather move less.
/// With two members both move the same, and one hop is better.
const DIRECT_LIMIT: usize = 16 << 10;
/// Values that are summed at a time, over all members: bounds the scratch memory.
const SCRATCH_VALUES: usize = 1 << 20;
/// Longest message whose length only its sender knows.
const MESSAGE_LIMIT: u64 = 1 << 30;

impl Members<'_> {
    fn message(&self, operation: Operation, bytes: usize) -> Message {
        Message { operation, group: self.group, length: bytes as u64 }
    }

    /// Positions and ranks of the other members.
    fn others(&self) -> impl Iterator<Item = (usize, usize)> {
        self.ranks.iter().copied().enumerate().filter(move |&(position, _)| position != self.position)
    }

    /// Values from each member that are summed at a time.
    fn chunk(&self) -> usize {
        (SCRATCH_VALUES / self.ranks.len()).clamp(4 << 10, 64 << 10)
    }
}

/// Member `position`'s part of `total` values that are cut as evenly as possible.
fn even_part(total: usize, members: usize, position: usize) -> Range<usize> {
    let start = |position: usize| total / members * position + (total % members).min(position);
    start(position)..start(position + 1)
}

/// Member `position`'s part of values that are cut into parts of the given lengths.
fn listed_part(lengths: &[usize], position: usize) -> Range<usize> {
    let start: usize = lengths[..position].iter().sum();
    start..start + lengths[position]
}

pub(crate) fn all_reduce(links: &mut Links, members: Members, values: &mut [f32]) -> Result<(), FabricError> {
    let size = members.ranks.len();
    if size == 2 || values.len() <= DIRECT_LIMIT {
        return values.chunks_mut(members.chunk()).try_for_each(|chunk| direct_sum(links, members, chunk));
    }
    let total = values.len();
    let part = |position| even_part(total, size, position);
    scattered_sum(links, members, Operation::AllReduce, values, part)?;
    gather(links, members, Operation::AllReduce, values, part)
}

pub(crate) fn reduce_scatter(
    links: &mut Links,
    members: Members,
    values: &mut [f32],
    lengths: &[usize],
) -> Result<(), FabricError> {
    scattered_sum(links, members, Operation::ReduceScatter, values, |position| listed_part(lengths, position))
}

pub(crate) fn all_gather(
    links: &mut Links,
    members: Members,
    values: &mut [f32],
    lengths: &[usize],
) -> Result<(), FabricError> {
    gather(links, members, Operation::AllGather, values, |position| listed_part(lengths, position))
}

/// Everyone sends everything to everyone, and adds.
fn direct_sum(links: &mut Links, members: Members, values: &mut [f32]) -> Result<(), FabricError> {
    let length = values.len();
    let message = members.message(Operation::AllReduce, size_of_val(values));
    for (_, rank) in members.others() {
        links.begin_send(rank, message);
        links.begin_receive(rank, message);
    }
    with_scratch(links, members.ranks.len() * length, |links, scratch| {
        links.drive(Operation::AllReduce, members.ranks, false, |position, link| {
            let sent = link.send_step(bytemuck::cast_slice(values))?;
            let theirs = &mut scratch[position * length..][..length];
            let received = link.receive_step(bytemuck::cast_slice_mut(theirs))?;
            Ok(Step::of(link, sent || received))
        })?;
        sum_in_order(members, values, scratch, length);
        Ok(())
    })
}

/// Leaves each member its part summed.
fn scattered_sum(
    links: &mut Links,
    members: Members,
    operation: Operation,
    values: &mut [f32],
    part: impl Fn(usize) -> Range<usize>,
) -> Result<(), FabricError> {
    let (size, chunk) = (members.ranks.len(), members.chunk());
    let longest = (0..size).map(|position| part(position).len()).max().unwrap_or(0);
    with_scratch(links, size * longest.min(chunk), |links, scratch| {
        for start in (0..longest).step_by(chunk) {
            // Each member's part is cut into the same chunks; a shorter part runs out of them earlier.
            let piece = |position: usize| {
                let part = part(position);
                let at = |offset: usize| (part.start + offset).min(part.end);
                at(start)..at(start + chunk)
            };
            let own = piece(members.position);
            let stride = own.len();
            for (position, rank) in members.others() {
                let theirs = piece(position).len();
                if theirs > 0 {
                    links.begin_send(rank, members.message(operation, theirs * size_of::<f32>()));
                }
                if stride > 0 {
                    links.begin_receive(rank, members.message(operation, stride * size_of::<f32>()));
                }
            }
            links.drive(operation, members.ranks, false, |position, link| {
                let sent = link.send_step(bytemuck::cast_slice(&values[piece(position)]))?;
                let theirs = &mut scratch[position * stride..][..stride];
                let received = link.receive_step(bytemuck::cast_slice_mut(theirs))?;
                Ok(Step::of(link, sent || received))
            })?;
            sum_in_order(members, &mut values[own], scratch, stride);
        }
        Ok(())
    })
}

/// Every member's part to all.
fn gather(
    links: &mut Links,
    members: Members,
    operation: Operation,
    values: &mut [f32],
    part: impl Fn(usize) -> Range<usize>,
) -> Result<(), FabricError> {
    let own = part(members.position);
    for (position, rank) in members.others() {
        links.begin_send(rank, members.message(operation, own.len() * size_of::<f32>()));
        links.begin_receive(rank, members.message(operation, part(position).len() * size_of::<f32>()));
    }
    links.drive(operation, members.ranks, false, |position, link| {
        let sent = link.send_step(bytemuck::cast_slice(&values[own.clone()]))?;
        let received = link.receive_step(bytemuck::cast_slice_mut(&mut values[part(position)]))?;
        Ok(Step::of(link, sent || received))
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
    links.drive(OPERATION, members.ranks, false, |_, link| {
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
    links.drive(OPERATION, members.ranks, idle, |position, link| {
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

fn check_length(message: &[u8]) -> Result<(), FabricError> {
    let length = message.len();
    if length as u64 <= MESSAGE_LIMIT {
        return Ok(());
    }
    Err(FabricError::Invalid(format!("a message of {length} bytes is longer than {MESSAGE_LIMIT}")))
}

fn send_message(links: &mut Links, members: Members, to: usize, payload: &[u8]) -> Result<(), FabricError> {
    let rank = members.ranks[to];
    links.begin_send(rank, members.message(Operation::PointToPoint, payload.len()));
    links.drive(Operation::PointToPoint, &[rank], false, |_, link| {
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
    links.drive(operation, &[rank], idle, |_, link| {
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
    links.drive(Operation::Barrier, members.ranks, idle, |_, link| {
        let moved = link.send_step(&[])? | link.receive_step(&mut [])?;
        Ok(Step::of(link, moved))
    })
}

pub(crate) fn send(links: &mut Links, members: Members, to: usize, values: &[f32]) -> Result<(), FabricError> {
    send_message(links, members, to, bytemuck::cast_slice(values))
}

pub(crate) fn recv(links: &mut Links, members: Members, from: usize, values: &mut [f32]) -> Result<(), FabricError> {
    let rank = members.ranks[from];
    links.begin_receive(rank, members.message(Operation::PointToPoint, size_of_val(values)));
    links.drive(Operation::PointToPoint, &[rank], false, |_, link| {
        let moved = link.receive_step(bytemuck::cast_slice_mut(values))?;
        Ok(Step::of(link, moved))
    })
}

/// Lends the scratch buffer, at least `length` values of it.
fn with_scratch<T>(links: &mut Links, length: usize, body: impl FnOnce(&mut Links, &mut [f32]) -> T) -> T {
    let mut scratch = std::mem::take(&mut links.scratch);
    if scratch.len() < length {
        scratch.resize(length, 0.0);
    }
    let result = body(links, &mut scratch);
    links.scratch = scratch;
    result
}

/// `values` becomes the sum of all members' values in member order; the others' lie in `theirs`, `stride` apart.
fn sum_in_order(members: Members, values: &mut [f32], theirs: &[f32], stride: usize) {
    /// Values whose sum stays in the first-level cache.
    const BLOCK: usize = 1024;
    let mut sum = [0.0f32; BLOCK];
    for (block, values) in values.chunks_mut(BLOCK).enumerate() {
        let sum = &mut sum[..values.len()];
        for position in 0..members.ranks.len() {
            let addends = if position == members.position {
                &*values
            } else {
                &theirs[position * stride + block * BLOCK..][..values.len()]
            };
            if position == 0 {
                sum.copy_from_slice(addends);
            } else {
                sum.iter_mut().zip(addends).for_each(|(sum, addend)| *sum += addend);
            }
        }
        values.copy_from_slice(sum);
    }
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

    #[test]
    fn sums_follow_member_order() {
        // In another order, or with the big values first cancelled, the small one would survive.
        let members = Members { ranks: &[0, 1, 2], position: 1, group: 0 };
        let mut values = [1.0f32; 2000];
        let theirs = [[1e30f32; 2000], [0.0; 2000], [-1e30; 2000]].concat();
        sum_in_order(members, &mut values, &theirs, 2000);
        assert!(values.iter().all(|&value| value == 0.0));
    }
}
