//! The verbs library, opened at run time: so much of its C interface as a rail needs, by hand.
//!
//! The layouts are those of rdma-core's `infiniband/verbs.h`, which Apple's library shares. They are compared with known ones
//! when this is compiled, and by a test with what a C compiler makes of the installed header.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::offset_of;
use std::sync::OnceLock;

/// Library names, first found first taken.
#[cfg(target_os = "macos")]
const LIBRARIES: [&CStr; 2] = [c"/usr/lib/librdma.dylib", c"librdma.dylib"];
#[cfg(not(target_os = "macos"))]
const LIBRARIES: [&CStr; 2] = [c"libibverbs.so.1", c"libibverbs.so"];

/// An opaque device of the library's list.
#[repr(C)]
pub(crate) struct DeviceHandle([u8; 0]);
/// An opaque protection domain.
#[repr(C)]
pub(crate) struct ProtectionDomain([u8; 0]);

/// An open device. The calls of the fast path are not exported symbols but entries of its table.
#[repr(C)]
pub(crate) struct Context {
    pub(super) device: *mut DeviceHandle,
    pub(super) operations: [*const c_void; 32],
}

/// Places in [`Context`]'s table.
pub(super) const POLL_CQ: usize = 11;
pub(super) const POST_SEND: usize = 25;
pub(super) const POST_RECV: usize = 26;

/// A completion queue, as far as it is looked into.
#[repr(C)]
pub(crate) struct CompletionQueue {
    pub(super) context: *mut Context,
}

/// A queue pair, as far as it is looked into.
#[repr(C)]
pub(crate) struct QueuePair {
    pub(super) context: *mut Context,
    pub(super) qp_context: *mut c_void,
    pub(super) pd: *mut ProtectionDomain,
    pub(super) send_cq: *mut CompletionQueue,
    pub(super) recv_cq: *mut CompletionQueue,
    pub(super) srq: *mut c_void,
    pub(super) handle: u32,
    pub number: u32,
}

/// Registered memory, as far as it is looked into.
#[repr(C)]
pub(crate) struct MemoryRegion {
    pub(super) context: *mut Context,
    pub(super) pd: *mut ProtectionDomain,
    pub(super) address: *mut c_void,
    pub(super) length: usize,
    pub(super) handle: u32,
    pub local_key: u32,
    pub(super) remote_key: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct PortAttributes {
    pub state: c_int,
    pub max_mtu: c_int,
    pub active_mtu: c_int,
    pub gid_table_length: c_int,
    pub capabilities: u32,
    pub max_message_bytes: u32,
    bad_pkey_counter: u32,
    qkey_violation_counter: u32,
    pkey_table_length: u16,
    pub lid: u16,
    sm_lid: u16,
    lmc: u8,
    max_vl_num: u8,
    sm_sl: u8,
    subnet_timeout: u8,
    init_type_reply: u8,
    active_width: u8,
    active_speed: u8,
    physical_state: u8,
    pub link_layer: u8,
    flags: u8,
    capabilities2: u16,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct GlobalRoute {
    pub destination: [u64; 2],
    pub flow_label: u32,
    pub source_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct AddressHandleAttributes {
    pub route: GlobalRoute,
    pub destination_lid: u16,
    service_level: u8,
    source_path_bits: u8,
    static_rate: u8,
    pub is_global: u8,
    pub port: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct QueuePairCapacity {
    pub max_send_requests: u32,
    pub max_recv_requests: u32,
    pub max_send_pieces: u32,
    pub max_recv_pieces: u32,
    pub max_inline_bytes: u32,
}

#[repr(C)]
pub(crate) struct QueuePairInit {
    pub context: *mut c_void,
    pub send_cq: *mut CompletionQueue,
    pub recv_cq: *mut CompletionQueue,
    pub srq: *mut c_void,
    pub capacity: QueuePairCapacity,
    pub kind: c_int,
    pub signal_all: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct QueuePairAttributes {
    pub state: c_int,
    pub current_state: c_int,
    pub path_mtu: c_int,
    pub migration_state: c_int,
    pub qkey: u32,
    pub receive_psn: u32,
    pub send_psn: u32,
    pub destination: u32,
    pub access: c_uint,
    pub capacity: QueuePairCapacity,
    pub address: AddressHandleAttributes,
    pub alternate_address: AddressHandleAttributes,
    pub pkey_index: u16,
    pub alternate_pkey_index: u16,
    pub drained_notification: u8,
    pub draining: u8,
    pub max_reads: u8,
    pub max_destination_reads: u8,
    pub min_not_ready_timer: u8,
    pub port: u8,
    pub timeout: u8,
    pub retries: u8,
    pub not_ready_retries: u8,
    pub alternate_port: u8,
    pub alternate_timeout: u8,
    pub rate_limit: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Piece {
    pub address: u64,
    pub length: u32,
    pub local_key: u32,
}

#[repr(C)]
pub(crate) struct SendRequest {
    pub id: u64,
    pub next: *mut SendRequest,
    pub pieces: *mut Piece,
    pub piece_count: c_int,
    pub opcode: c_int,
    pub flags: c_uint,
    pub immediate: u32,
    /// Unions for operations that are not used here.
    pub unused: [u64; 4],
    pub unused_xrc: u64,
    pub unused_bind: [u64; 6],
}

#[repr(C)]
pub(crate) struct RecvRequest {
    pub id: u64,
    pub next: *mut RecvRequest,
    pub pieces: *mut Piece,
    pub piece_count: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Completion {
    pub id: u64,
    pub status: c_int,
    pub opcode: c_int,
    pub vendor_error: u32,
    pub length: u32,
    immediate: u32,
    qp_number: u32,
    source_qp: u32,
    flags: c_uint,
    pkey_index: u16,
    source_lid: u16,
    service_level: u8,
    path_bits: u8,
}

pub(crate) const PORT_ACTIVE: c_int = 4;
pub(crate) const LINK_LAYER_INFINIBAND: u8 = 1;
pub(crate) const ACCESS_LOCAL_WRITE: c_int = 1;
pub(crate) const KIND_RELIABLE: c_int = 2;
pub(crate) const KIND_UNRELIABLE: c_int = 3;
pub(crate) const OPCODE_SEND: c_int = 2;
pub(crate) const FLAG_SIGNALED: c_uint = 2;
pub(crate) const FLAG_INLINE: c_uint = 8;
/// Set in [`Completion::opcode`] of receives.
pub(crate) const COMPLETION_RECV: c_int = 128;
pub(crate) const STATE_INIT: c_int = 1;
pub(crate) const STATE_READY_TO_RECEIVE: c_int = 2;
pub(crate) const STATE_READY_TO_SEND: c_int = 3;

/// Bits that say which fields of [`QueuePairAttributes`] are meant.
pub(crate) mod mask {
    use std::ffi::c_int;
    pub const STATE: c_int = 1 << 0;
    pub const ACCESS: c_int = 1 << 3;
    pub const PKEY_INDEX: c_int = 1 << 4;
    pub const PORT: c_int = 1 << 5;
    pub const ADDRESS: c_int = 1 << 7;
    pub const PATH_MTU: c_int = 1 << 8;
    pub const TIMEOUT: c_int = 1 << 9;
    pub const RETRIES: c_int = 1 << 10;
    pub const NOT_READY_RETRIES: c_int = 1 << 11;
    pub const RECEIVE_PSN: c_int = 1 << 12;
    pub const MAX_READS: c_int = 1 << 13;
    pub const NOT_READY_TIMER: c_int = 1 << 15;
    pub const SEND_PSN: c_int = 1 << 16;
    pub const MAX_DESTINATION_READS: c_int = 1 << 17;
    pub const DESTINATION: c_int = 1 << 20;
}

/// What C calls it, what this binding has, and what it is where pointers have 64 bits (rdma-core 44).
const LAYOUT: [(&str, usize, usize); 59] = [
    ("offsetof(struct ibv_context, ops.poll_cq)", offset_of!(Context, operations) + 8 * POLL_CQ, 96),
    ("offsetof(struct ibv_context, ops.post_send)", offset_of!(Context, operations) + 8 * POST_SEND, 208),
    ("offsetof(struct ibv_context, ops.post_recv)", offset_of!(Context, operations) + 8 * POST_RECV, 216),
    ("offsetof(struct ibv_qp, qp_num)", offset_of!(QueuePair, number), 52),
    ("offsetof(struct ibv_mr, lkey)", offset_of!(MemoryRegion, local_key), 36),
    ("sizeof(struct ibv_port_attr)", size_of::<PortAttributes>(), 52),
    ("offsetof(struct ibv_port_attr, active_mtu)", offset_of!(PortAttributes, active_mtu), 8),
    ("offsetof(struct ibv_port_attr, lid)", offset_of!(PortAttributes, lid), 34),
    ("offsetof(struct ibv_port_attr, link_layer)", offset_of!(PortAttributes, link_layer), 46),
    ("sizeof(struct ibv_ah_attr)", size_of::<AddressHandleAttributes>(), 32),
    ("offsetof(struct ibv_ah_attr, is_global)", offset_of!(AddressHandleAttributes, is_global), 29),
    ("offsetof(struct ibv_ah_attr, port_num)", offset_of!(AddressHandleAttributes, port), 30),
    ("offsetof(struct ibv_global_route, sgid_index)", offset_of!(GlobalRoute, source_index), 20),
    ("sizeof(struct ibv_qp_init_attr)", size_of::<QueuePairInit>(), 64),
    ("offsetof(struct ibv_qp_init_attr, qp_type)", offset_of!(QueuePairInit, kind), 52),
    ("sizeof(struct ibv_qp_attr)", size_of::<QueuePairAttributes>(), 144),
    ("offsetof(struct ibv_qp_attr, dest_qp_num)", offset_of!(QueuePairAttributes, destination), 28),
    ("offsetof(struct ibv_qp_attr, ah_attr)", offset_of!(QueuePairAttributes, address), 56),
    ("offsetof(struct ibv_qp_attr, pkey_index)", offset_of!(QueuePairAttributes, pkey_index), 120),
    ("offsetof(struct ibv_qp_attr, max_rd_atomic)", offset_of!(QueuePairAttributes, max_reads), 126),
    ("offsetof(struct ibv_qp_attr, port_num)", offset_of!(QueuePairAttributes, port), 129),
    ("offsetof(struct ibv_qp_attr, rnr_retry)", offset_of!(QueuePairAttributes, not_ready_retries), 132),
    ("sizeof(struct ibv_sge)", size_of::<Piece>(), 16),
    ("sizeof(struct ibv_send_wr)", size_of::<SendRequest>(), 128),
    ("offsetof(struct ibv_send_wr, opcode)", offset_of!(SendRequest, opcode), 28),
    ("offsetof(struct ibv_send_wr, send_flags)", offset_of!(SendRequest, flags), 32),
    ("offsetof(struct ibv_send_wr, imm_data)", offset_of!(SendRequest, immediate), 36),
    ("offsetof(struct ibv_send_wr, wr)", offset_of!(SendRequest, unused), 40),
    ("sizeof(struct ibv_recv_wr)", size_of::<RecvRequest>(), 32),
    ("sizeof(struct ibv_wc)", size_of::<Completion>(), 48),
    ("offsetof(struct ibv_wc, status)", offset_of!(Completion, status), 8),
    ("offsetof(struct ibv_wc, byte_len)", offset_of!(Completion, length), 20),
    ("IBV_PORT_ACTIVE", PORT_ACTIVE as usize, 4),
    ("IBV_LINK_LAYER_INFINIBAND", LINK_LAYER_INFINIBAND as usize, 1),
    ("IBV_ACCESS_LOCAL_WRITE", ACCESS_LOCAL_WRITE as usize, 1),
    ("IBV_QPT_RC", KIND_RELIABLE as usize, 2),
    ("IBV_QPT_UC", KIND_UNRELIABLE as usize, 3),
    ("IBV_WR_SEND", OPCODE_SEND as usize, 2),
    ("IBV_SEND_SIGNALED", FLAG_SIGNALED as usize, 2),
    ("IBV_SEND_INLINE", FLAG_INLINE as usize, 8),
    ("IBV_WC_RECV", COMPLETION_RECV as usize, 128),
    ("IBV_QPS_INIT", STATE_INIT as usize, 1),
    ("IBV_QPS_RTR", STATE_READY_TO_RECEIVE as usize, 2),
    ("IBV_QPS_RTS", STATE_READY_TO_SEND as usize, 3),
    ("IBV_QP_STATE", mask::STATE as usize, 1),
    ("IBV_QP_ACCESS_FLAGS", mask::ACCESS as usize, 8),
    ("IBV_QP_PKEY_INDEX", mask::PKEY_INDEX as usize, 16),
    ("IBV_QP_PORT", mask::PORT as usize, 32),
    ("IBV_QP_AV", mask::ADDRESS as usize, 128),
    ("IBV_QP_PATH_MTU", mask::PATH_MTU as usize, 256),
    ("IBV_QP_TIMEOUT", mask::TIMEOUT as usize, 512),
    ("IBV_QP_RETRY_CNT", mask::RETRIES as usize, 1024),
    ("IBV_QP_RNR_RETRY", mask::NOT_READY_RETRIES as usize, 2048),
    ("IBV_QP_RQ_PSN", mask::RECEIVE_PSN as usize, 4096),
    ("IBV_QP_MAX_QP_RD_ATOMIC", mask::MAX_READS as usize, 8192),
    ("IBV_QP_MIN_RNR_TIMER", mask::NOT_READY_TIMER as usize, 32768),
    ("IBV_QP_SQ_PSN", mask::SEND_PSN as usize, 65536),
    ("IBV_QP_MAX_DEST_RD_ATOMIC", mask::MAX_DESTINATION_READS as usize, 131072),
    ("IBV_QP_DEST_QPN", mask::DESTINATION as usize, 1048576),
];

// A difference would have the library write where nobody expects it.
const _: () = {
    let mut at = 0;
    while at < LAYOUT.len() {
        assert!(cfg!(not(target_pointer_width = "64")) || LAYOUT[at].1 == LAYOUT[at].2);
        at += 1;
    }
};

/// Declares the table of exported functions and how it is filled, so that a name is written once.
macro_rules! library {
    ($($name:ident = $symbol:literal: fn($($argument:ty),*) -> $result:ty;)*) => {
        /// The library's exported functions.
        pub(crate) struct Verbs {
            $(pub $name: unsafe extern "C" fn($($argument),*) -> $result,)*
            /// Whether an entry of a device's GID table stands for routable RoCE (version 2): device, port, index. `None` where
            /// the system does not say. The library itself has no call for it that all versions share.
            pub is_routable: fn(&str, u8, c_int) -> Option<bool>,
        }

        impl Verbs {
            /// # Safety
            /// `library` is a handle of a verbs library.
            unsafe fn resolve(library: *mut c_void) -> Result<Self, String> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the handle is open, the symbol a C string.
                        let address = unsafe { libc::dlsym(library, $symbol.as_ptr()) };
                        if address.is_null() {
                            return Err(format!("the verbs library lacks {}", $symbol.to_string_lossy()));
                        }
                        // SAFETY: the symbol of this name has this signature in all verbs libraries.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> $result>(address) }
                    },)*
                    is_routable,
                })
            }
        }
    };
}

library! {
    get_device_list = c"ibv_get_device_list": fn(*mut c_int) -> *mut *mut DeviceHandle;
    free_device_list = c"ibv_free_device_list": fn(*mut *mut DeviceHandle) -> ();
    get_device_name = c"ibv_get_device_name": fn(*mut DeviceHandle) -> *const c_char;
    open_device = c"ibv_open_device": fn(*mut DeviceHandle) -> *mut Context;
    close_device = c"ibv_close_device": fn(*mut Context) -> c_int;
    query_port = c"ibv_query_port": fn(*mut Context, u8, *mut PortAttributes) -> c_int;
    query_gid = c"ibv_query_gid": fn(*mut Context, u8, c_int, *mut [u64; 2]) -> c_int;
    alloc_pd = c"ibv_alloc_pd": fn(*mut Context) -> *mut ProtectionDomain;
    dealloc_pd = c"ibv_dealloc_pd": fn(*mut ProtectionDomain) -> c_int;
    reg_mr = c"ibv_reg_mr": fn(*mut ProtectionDomain, *mut c_void, usize, c_int) -> *mut MemoryRegion;
    dereg_mr = c"ibv_dereg_mr": fn(*mut MemoryRegion) -> c_int;
    create_cq = c"ibv_create_cq": fn(*mut Context, c_int, *mut c_void, *mut c_void, c_int) -> *mut CompletionQueue;
    destroy_cq = c"ibv_destroy_cq": fn(*mut CompletionQueue) -> c_int;
    create_qp = c"ibv_create_qp": fn(*mut ProtectionDomain, *mut QueuePairInit) -> *mut QueuePair;
    modify_qp = c"ibv_modify_qp": fn(*mut QueuePair, *mut QueuePairAttributes, c_int) -> c_int;
    destroy_qp = c"ibv_destroy_qp": fn(*mut QueuePair) -> c_int;
}

/// As Linux keeps it beside the device.
fn is_routable(device: &str, port: u8, index: c_int) -> Option<bool> {
    let path = format!("/sys/class/infiniband/{device}/ports/{port}/gid_attrs/types/{index}");
    std::fs::read_to_string(path).ok().map(|kind| kind.contains("v2"))
}

/// What a completion's status means, in the words of `ibv_wc_status_str`.
pub(crate) fn status_name(status: c_int) -> &'static str {
    const NAMES: [&str; 23] = [
        "success",
        "local length error",
        "local queue pair operation error",
        "local end-to-end context error",
        "local protection error",
        "request flushed",
        "memory window bind error",
        "bad response",
        "local access error",
        "remote invalid request",
        "remote access error",
        "remote operation error",
        "transport retries exceeded: the peer does not answer",
        "receiver not ready retries exceeded",
        "local domain violation",
        "remote invalid domain request",
        "operation aborted",
        "invalid end-to-end context number",
        "invalid end-to-end context state",
        "fatal error",
        "response timeout",
        "general error",
        "tag matching error",
    ];
    usize::try_from(status).ok().and_then(|at| NAMES.get(at)).copied().unwrap_or("unknown")
}

impl Verbs {
    /// The library, opened on first use; or why there is none, in one line.
    pub fn open() -> Result<&'static Self, String> {
        static VERBS: OnceLock<Result<Verbs, String>> = OnceLock::new();
        let open = || {
            // SAFETY: the names are C strings; opening a system library runs its initialisation only.
            let library = LIBRARIES.iter().map(|name| unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) });
            let library = library.into_iter().find(|library| !library.is_null());
            let missing = || format!("{} is not installed", LIBRARIES[0].to_string_lossy());
            // SAFETY: a verbs library was opened above, and stays open for good.
            unsafe { Self::resolve(library.ok_or_else(missing)?) }
        };
        VERBS.get_or_init(open).as_ref().map_err(Clone::clone)
    }
}

/// Takes finished requests off a queue; a negative number is a failure.
///
/// # Safety
/// `queue` is alive.
pub(crate) unsafe fn poll(queue: *mut CompletionQueue, completions: &mut [Completion]) -> c_int {
    type Poll = unsafe extern "C" fn(*mut CompletionQueue, c_int, *mut Completion) -> c_int;
    // SAFETY: the table's entry has this type, and `completions` has room for as many as said.
    unsafe {
        let call = std::mem::transmute::<*const c_void, Poll>((*(*queue).context).operations[POLL_CQ]);
        call(queue, completions.len() as c_int, completions.as_mut_ptr())
    }
}

/// Queues one send; anything but 0 is an error number.
///
/// # Safety
/// `queue_pair` is alive, and the request's pieces lie in registered memory that stays as it is until the completion.
pub(crate) unsafe fn post_send(queue_pair: *mut QueuePair, request: &mut SendRequest) -> c_int {
    type Post = unsafe extern "C" fn(*mut QueuePair, *mut SendRequest, *mut *mut SendRequest) -> c_int;
    let mut refused = std::ptr::null_mut();
    // SAFETY: the table's entry has this type.
    unsafe {
        let call = std::mem::transmute::<*const c_void, Post>((*(*queue_pair).context).operations[POST_SEND]);
        call(queue_pair, request, &mut refused)
    }
}

/// Queues one receive; anything but 0 is an error number.
///
/// # Safety
/// `queue_pair` is alive, and nobody touches the request's pieces until the completion.
pub(crate) unsafe fn post_recv(queue_pair: *mut QueuePair, request: &mut RecvRequest) -> c_int {
    type Post = unsafe extern "C" fn(*mut QueuePair, *mut RecvRequest, *mut *mut RecvRequest) -> c_int;
    let mut refused = std::ptr::null_mut();
    // SAFETY: the table's entry has this type.
    unsafe {
        let call = std::mem::transmute::<*const c_void, Post>((*(*queue_pair).context).operations[POST_RECV]);
        call(queue_pair, request, &mut refused)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// Needs a C compiler and the verbs header; where they are missing it says so, and the comparison with known layouts must do.
    #[test]
    fn layouts_equal_those_of_the_installed_header() {
        let folder = tempfile::tempdir().unwrap();
        let prints: String =
            LAYOUT.iter().map(|(expression, ..)| format!("printf(\"%zu\\n\", (size_t)({expression}));\n")).collect();
        let source = format!(
            "#include <infiniband/verbs.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {{\n{prints}return 0;\n}}\n"
        );
        std::fs::write(folder.path().join("probe.c"), source).unwrap();
        let mut compiler = Command::new("cc");
        let compiled = compiler.current_dir(&folder).args(["-o", "probe", "probe.c"]).output();
        if !compiled.is_ok_and(|output| output.status.success()) {
            eprintln!("skipped: no C compiler or no infiniband/verbs.h (Debian: libibverbs-dev)");
            return;
        }
        let output = Command::new(folder.path().join("probe")).output().unwrap().stdout;
        let numbers: Vec<usize> =
            String::from_utf8(output).unwrap().lines().map(|line| line.parse().unwrap()).collect();
        assert_eq!(numbers.len(), LAYOUT.len());
        for ((expression, ours, _), theirs) in LAYOUT.into_iter().zip(numbers) {
            assert_eq!(ours, theirs, "{expression}");
        }
    }
}
