//! A verbs library within this process: the same table of functions as the real one, over devices that behave as a test says.
//! For faults that no software device makes.
//!
//! Queue pairs of all devices share one switch, by number. A message arrives while it is being sent; on an unreliable pair it is
//! lost where no receive is posted, on a reliable one it waits for the next.

// One argument holds for all of them: callers pass on what this library gave them, as the real one demands too.
#![allow(clippy::undocumented_unsafe_blocks)]

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::verbs::{
    self, Completion, CompletionQueue, Context, DeviceHandle, MemoryRegion, PortAttributes, ProtectionDomain,
    QueuePair, QueuePairAttributes, QueuePairInit, RecvRequest, SendRequest, Verbs, mask,
};

/// Something that goes wrong with one message.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    /// The send is refused with this error number.
    RefuseSend(c_int),
    /// The send completes with this status, and nothing arrives.
    FailSend(c_int),
    /// The receive completes with this status.
    FailReceive(c_int),
    /// The send completes, and nothing arrives.
    Lose,
    /// So many bytes of it arrive.
    CutTo(usize),
}

/// One device, with what a test wants of it and what a test wants to know.
pub struct FakeDevice {
    pub name: CString,
    pub state: AtomicI32,
    pub active_mtu: c_int,
    /// Addresses with whether each is routable RoCE.
    pub gids: Vec<([u8; 16], Option<bool>)>,
    /// Places of addresses that no message reaches or leaves, and of those with which no pair gets ready to receive.
    pub dead_gids: Vec<u8>,
    pub refused_gids: Vec<u8>,
    pub has_reliable: bool,
    pub most_pairs: usize,
    pub most_regions: usize,
    /// Requests that a queue pair holds at most; asking for more fails.
    pub most_requests: u32,
    /// Longest message that goes with its request; asking for more fails.
    pub most_inline_bytes: u32,
    /// Requests that a queue pair is granted, whatever was asked for.
    pub granted_requests: Option<u32>,
    /// The number of the message, from 0, and what happens to it.
    pub fault: Mutex<Option<(u64, Fault)>>,
    /// Every so-many-th message gets lost.
    pub lose_every: Option<u64>,
    /// Messages that were sent so far, and those of them that went with their request.
    pub sent: AtomicU64,
    pub inline: AtomicU32,
    pub pairs: AtomicUsize,
    pub regions: AtomicUsize,
    /// Path MTU and GID index of each pair that became ready to receive.
    pub paths: Mutex<Vec<(c_int, u8)>>,
}

impl FakeDevice {
    /// A device without faults, over routable RoCE.
    pub fn new(name: &str) -> Self {
        Self {
            name: CString::new(name).unwrap(),
            state: AtomicI32::new(verbs::PORT_ACTIVE),
            active_mtu: 5,
            gids: vec![("::ffff:10.0.0.1".parse::<std::net::Ipv6Addr>().unwrap().octets(), Some(true))],
            dead_gids: Vec::new(),
            refused_gids: Vec::new(),
            has_reliable: true,
            most_pairs: 1000,
            most_regions: 1000,
            most_requests: 1000,
            most_inline_bytes: 192,
            granted_requests: None,
            fault: Mutex::new(None),
            lose_every: None,
            sent: AtomicU64::new(0),
            inline: AtomicU32::new(0),
            pairs: AtomicUsize::new(0),
            regions: AtomicUsize::new(0),
            paths: Mutex::new(Vec::new()),
        }
    }

    /// From now on the `number`th message from now has this fault.
    pub fn strike(&self, number: u64, fault: Fault) {
        *lock(&self.fault) = Some((self.sent.load(Ordering::SeqCst) + number, fault));
    }
}

/// Makes a device one of those that the library lists for this thread.
pub fn plug_in(device: FakeDevice) -> Arc<FakeDevice> {
    let device = Arc::new(device);
    DEVICES.with_borrow_mut(|devices| devices.push(device.clone()));
    device
}

/// Takes all devices out of this thread's list; what is open stays so.
pub fn unplug_all() {
    DEVICES.with_borrow_mut(Vec::clear);
}

thread_local! {
    static DEVICES: RefCell<Vec<Arc<FakeDevice>>> = const { RefCell::new(Vec::new()) };
}

/// Addresses of all queue pairs, by number.
static SWITCH: Mutex<BTreeMap<u32, usize>> = Mutex::new(BTreeMap::new());
static NEXT_NUMBER: AtomicU32 = AtomicU32::new(1);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Each object begins as the real library's, so that what is read through the table is where it belongs.
#[repr(C)]
struct FakeContext {
    context: Context,
    device: Arc<FakeDevice>,
}

#[repr(C)]
struct FakeQueue {
    queue: CompletionQueue,
    completions: Mutex<VecDeque<Completion>>,
}

#[repr(C)]
struct FakePair {
    pair: QueuePair,
    device: Arc<FakeDevice>,
    reliable: bool,
    state: Mutex<PairState>,
}

#[derive(Default)]
struct PairState {
    destination: u32,
    /// Whether nothing reaches or leaves its address.
    dead: bool,
    /// Id, address and length of each posted receive.
    receives: VecDeque<(u64, u64, u32)>,
    /// Messages that wait for a receive.
    waiting: VecDeque<(Vec<u8>, c_int)>,
}

fn completion(id: u64, status: c_int, opcode: c_int, length: u32) -> Completion {
    let mut completion = Completion::default();
    (completion.id, completion.status, completion.opcode, completion.length) = (id, status, opcode, length);
    completion
}

impl FakePair {
    fn complete(queue: *mut CompletionQueue, completion: Completion) {
        // SAFETY: every queue of this library is a `FakeQueue` and outlives the pairs that use it.
        let queue = unsafe { &*queue.cast::<FakeQueue>() };
        lock(&queue.completions).push_back(completion);
    }

    /// Gives waiting messages to posted receives.
    fn settle(&self) {
        let mut state = lock(&self.state);
        while !state.receives.is_empty() && !state.waiting.is_empty() {
            let ((id, address, room), (bytes, status)) =
                (state.receives.pop_front().unwrap(), state.waiting.pop_front().unwrap());
            let length = bytes.len().min(room as usize);
            // SAFETY: whoever posted the receive keeps `room` bytes there until it completes.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, length) };
            Self::complete(self.pair.recv_cq, completion(id, status, verbs::COMPLETION_RECV, length as u32));
        }
        if !self.reliable {
            state.waiting.clear();
        }
    }
}

/// The library.
pub static LIBRARY: Verbs = Verbs {
    get_device_list,
    free_device_list,
    get_device_name,
    open_device,
    close_device,
    query_port,
    query_gid,
    alloc_pd,
    dealloc_pd,
    reg_mr,
    dereg_mr,
    create_cq,
    destroy_cq,
    create_qp,
    modify_qp,
    destroy_qp,
    is_routable: |name, _, index| {
        DEVICES.with_borrow(|devices| {
            let device = devices.iter().find(|device| device.name.to_str() == Ok(name))?;
            device.gids.get(index as usize)?.1
        })
    },
};

unsafe extern "C" fn get_device_list(count: *mut c_int) -> *mut *mut DeviceHandle {
    let mut handles: Vec<*mut DeviceHandle> =
        DEVICES.with_borrow(|devices| devices.iter().map(|device| Arc::as_ptr(device).cast_mut().cast()).collect());
    unsafe { *count = handles.len() as c_int };
    handles.push(null_mut());
    Box::into_raw(handles.into_boxed_slice()).cast()
}

unsafe extern "C" fn free_device_list(list: *mut *mut DeviceHandle) {
    let mut length = 1;
    unsafe {
        while !(*list.add(length - 1)).is_null() {
            length += 1;
        }
        drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(list, length)));
    }
}

unsafe extern "C" fn get_device_name(handle: *mut DeviceHandle) -> *const c_char {
    unsafe { (*handle.cast::<FakeDevice>()).name.as_ptr() }
}

unsafe extern "C" fn open_device(handle: *mut DeviceHandle) -> *mut Context {
    let mut operations = [std::ptr::null::<c_void>(); 32];
    operations[verbs::POLL_CQ] = poll_cq as *const c_void;
    operations[verbs::POST_SEND] = post_send as *const c_void;
    operations[verbs::POST_RECV] = post_recv as *const c_void;
    let device = unsafe {
        Arc::increment_strong_count(handle.cast::<FakeDevice>());
        Arc::from_raw(handle.cast::<FakeDevice>())
    };
    let context = Context { device: handle, operations };
    Box::into_raw(Box::new(FakeContext { context, device })).cast()
}

unsafe extern "C" fn close_device(context: *mut Context) -> c_int {
    drop(unsafe { Box::from_raw(context.cast::<FakeContext>()) });
    0
}

fn device(context: *mut Context) -> Arc<FakeDevice> {
    // SAFETY: every context of this library is a `FakeContext`.
    unsafe { (*context.cast::<FakeContext>()).device.clone() }
}

unsafe extern "C" fn query_port(context: *mut Context, _: u8, port: *mut PortAttributes) -> c_int {
    let device = device(context);
    let port = unsafe { &mut *port };
    (port.state, port.active_mtu) = (device.state.load(Ordering::SeqCst), device.active_mtu);
    (port.gid_table_length, port.link_layer) = (device.gids.len() as c_int, 2);
    0
}

unsafe extern "C" fn query_gid(context: *mut Context, _: u8, index: c_int, gid: *mut [u64; 2]) -> c_int {
    unsafe { *gid = bytemuck::cast(device(context).gids[index as usize].0) };
    0
}

unsafe extern "C" fn alloc_pd(context: *mut Context) -> *mut ProtectionDomain {
    Box::into_raw(Box::new(context)).cast()
}

unsafe extern "C" fn dealloc_pd(domain: *mut ProtectionDomain) -> c_int {
    drop(unsafe { Box::from_raw(domain.cast::<*mut Context>()) });
    0
}

fn context_of(domain: *mut ProtectionDomain) -> *mut Context {
    // SAFETY: every domain of this library is a box of its context.
    unsafe { *domain.cast::<*mut Context>() }
}

fn refuse(error: c_int) {
    #[cfg(not(target_os = "macos"))]
    use libc::__errno_location as error_number;
    #[cfg(target_os = "macos")]
    use libc::__error as error_number;
    // SAFETY: the error number is this thread's own.
    unsafe { *error_number() = error };
}

unsafe extern "C" fn reg_mr(
    pd: *mut ProtectionDomain,
    address: *mut c_void,
    length: usize,
    _: c_int,
) -> *mut MemoryRegion {
    let context = context_of(pd);
    let device = device(context);
    if device.regions.fetch_add(1, Ordering::SeqCst) >= device.most_regions {
        device.regions.fetch_sub(1, Ordering::SeqCst);
        refuse(libc::ENOMEM);
        return null_mut();
    }
    Box::into_raw(Box::new(MemoryRegion { context, pd, address, length, handle: 0, local_key: 7, remote_key: 7 }))
}

unsafe extern "C" fn dereg_mr(region: *mut MemoryRegion) -> c_int {
    let region = unsafe { Box::from_raw(region) };
    device(region.context).regions.fetch_sub(1, Ordering::SeqCst);
    0
}

unsafe extern "C" fn create_cq(
    context: *mut Context,
    _: c_int,
    _: *mut c_void,
    _: *mut c_void,
    _: c_int,
) -> *mut CompletionQueue {
    Box::into_raw(Box::new(FakeQueue { queue: CompletionQueue { context }, completions: Mutex::default() })).cast()
}

unsafe extern "C" fn destroy_cq(queue: *mut CompletionQueue) -> c_int {
    drop(unsafe { Box::from_raw(queue.cast::<FakeQueue>()) });
    0
}

unsafe extern "C" fn create_qp(pd: *mut ProtectionDomain, init: *mut QueuePairInit) -> *mut QueuePair {
    let context = context_of(pd);
    let device = device(context);
    let init = unsafe { &mut *init };
    let reliable = init.kind == verbs::KIND_RELIABLE;
    let obstacle = if reliable && !device.has_reliable {
        Some(libc::EOPNOTSUPP)
    } else if init.capacity.max_send_requests > device.most_requests
        || init.capacity.max_inline_bytes > device.most_inline_bytes
    {
        Some(libc::EINVAL)
    } else if device.pairs.load(Ordering::SeqCst) >= device.most_pairs {
        Some(libc::EBUSY)
    } else {
        None
    };
    if let Some(error) = obstacle {
        refuse(error);
        return null_mut();
    }
    device.pairs.fetch_add(1, Ordering::SeqCst);
    if let Some(granted) = device.granted_requests {
        (init.capacity.max_send_requests, init.capacity.max_recv_requests) = (granted, granted);
    }
    let number = NEXT_NUMBER.fetch_add(1, Ordering::SeqCst);
    let QueuePairInit { send_cq, recv_cq, .. } = *init;
    let pair = QueuePair { context, qp_context: null_mut(), pd, send_cq, recv_cq, srq: null_mut(), handle: 0, number };
    let pair = Box::into_raw(Box::new(FakePair { pair, device, reliable, state: Mutex::default() }));
    lock(&SWITCH).insert(number, pair as usize);
    pair.cast()
}

unsafe extern "C" fn modify_qp(pair: *mut QueuePair, attributes: *mut QueuePairAttributes, fields: c_int) -> c_int {
    let (pair, attributes) = unsafe { (&*pair.cast::<FakePair>(), &*attributes) };
    if fields & mask::DESTINATION != 0 {
        let gid = attributes.address.route.source_index;
        if pair.device.refused_gids.contains(&gid) {
            return libc::EINVAL;
        }
        let mut state = lock(&pair.state);
        (state.destination, state.dead) = (attributes.destination, pair.device.dead_gids.contains(&gid));
        lock(&pair.device.paths).push((attributes.path_mtu, attributes.address.route.source_index));
    }
    0
}

unsafe extern "C" fn destroy_qp(pair: *mut QueuePair) -> c_int {
    let mut switch = lock(&SWITCH);
    let pair = unsafe { Box::from_raw(pair.cast::<FakePair>()) };
    switch.remove(&pair.pair.number);
    pair.device.pairs.fetch_sub(1, Ordering::SeqCst);
    0
}

unsafe extern "C" fn poll_cq(queue: *mut CompletionQueue, most: c_int, completions: *mut Completion) -> c_int {
    let mut queue = lock(unsafe { &(*queue.cast::<FakeQueue>()).completions });
    let count = queue.len().min(most as usize);
    for (at, completion) in queue.drain(..count).enumerate() {
        unsafe { *completions.add(at) = completion };
    }
    count as c_int
}

unsafe extern "C" fn post_send(pair: *mut QueuePair, request: *mut SendRequest, _: *mut *mut SendRequest) -> c_int {
    let (pair, request) = unsafe { (&*pair.cast::<FakePair>(), &*request) };
    let piece = unsafe { *request.pieces };
    assert_eq!((request.piece_count, request.opcode, piece.local_key), (1, verbs::OPCODE_SEND, 7));
    // SAFETY: the sender keeps the bytes until the send completes, which is below.
    let mut bytes = unsafe { std::slice::from_raw_parts(piece.address as *const u8, piece.length as usize) }.to_vec();
    let inline = request.flags & verbs::FLAG_INLINE != 0;
    assert!(!inline || piece.length <= pair.device.most_inline_bytes, "{} bytes inline", piece.length);
    pair.device.inline.fetch_add(inline.into(), Ordering::SeqCst);
    let number = pair.device.sent.fetch_add(1, Ordering::SeqCst);
    let fault = lock(&pair.device.fault).and_then(|(at, fault)| (at == number).then_some(fault));
    let lost = pair.device.lose_every.is_some_and(|every| number % every == every - 1);
    let (mut send_status, mut receive_status, mut arrives) = (0, 0, !lost);
    match fault {
        Some(Fault::RefuseSend(error)) => return error,
        Some(Fault::FailSend(status)) => (send_status, arrives) = (status, false),
        Some(Fault::FailReceive(status)) => receive_status = status,
        Some(Fault::Lose) => arrives = false,
        Some(Fault::CutTo(length)) => bytes.truncate(length),
        None => {}
    }
    if arrives && pair.device.state.load(Ordering::SeqCst) == verbs::PORT_ACTIVE {
        let switch = lock(&SWITCH);
        let (destination, dead) = {
            let state = lock(&pair.state);
            (state.destination, state.dead)
        };
        if let Some(&address) = switch.get(&destination).filter(|_| !dead) {
            // SAFETY: a pair leaves the switch, whose lock is held, before it is freed.
            let peer = unsafe { &*(address as *const FakePair) };
            let mut state = lock(&peer.state);
            if !state.dead {
                state.waiting.push_back((bytes, receive_status));
            }
            drop(state);
            peer.settle();
        }
    }
    FakePair::complete(pair.pair.send_cq, completion(request.id, send_status, 0, piece.length));
    0
}

unsafe extern "C" fn post_recv(pair: *mut QueuePair, request: *mut RecvRequest, _: *mut *mut RecvRequest) -> c_int {
    let (pair, request) = unsafe { (&*pair.cast::<FakePair>(), &*request) };
    let piece = unsafe { *request.pieces };
    lock(&pair.state).receives.push_back((request.id, piece.address, piece.length));
    pair.settle();
    0
}
