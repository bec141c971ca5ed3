//! Mutual authentication and encryption of one connection: the Noise protocol, pattern NN with the cluster key as
//! pre-shared key. The first message of either side proves the key; every connection has session keys of its own.

use std::sync::Arc;

use snow::{HandshakeState, StatelessTransportState};

use crate::key::ClusterKey;

const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
/// Both sides must mean the same by what follows the handshake.
const PROLOGUE: &[u8] = b"consort fabric 1";
/// Bytes that encryption adds.
pub(crate) const TAG_BYTES: usize = 16;
/// Longest plain text of one record.
pub(crate) const RECORD_LIMIT: usize = 65_535 - TAG_BYTES;
/// Longest handshake message: a public key, and a tag.
pub(crate) const HANDSHAKE_LIMIT: usize = 64;

/// A handshake under way.
pub(crate) struct Handshake(HandshakeState);

/// One direction of an authenticated connection.
pub(crate) struct Cipher {
    state: Arc<StatelessTransportState>,
    /// Records so far. Each is counted, so that none can be left out, repeated or moved.
    records: u64,
}

impl Handshake {
    /// The side that connects, or the side that accepts.
    pub fn new(key: &ClusterKey, initiator: bool) -> Self {
        let pattern = PATTERN.parse().expect("the pattern is well-formed");
        let builder = snow::Builder::new(pattern).psk(0, key.bytes()).and_then(|builder| builder.prologue(PROLOGUE));
        let state = builder.and_then(|b| if initiator { b.build_initiator() } else { b.build_responder() });
        Self(state.expect("the key has the pattern's length and the ciphers are built in"))
    }

    /// This side's next message.
    pub fn write(&mut self) -> Vec<u8> {
        let mut message = vec![0; HANDSHAKE_LIMIT];
        let length = self.0.write_message(&[], &mut message).expect("it is this side's turn");
        message.truncate(length);
        message
    }

    /// Reads the other side's message; false if it does not know the key.
    pub fn read(&mut self, message: &[u8]) -> bool {
        self.0.read_message(message, &mut [0; HANDSHAKE_LIMIT]).is_ok()
    }

    /// The ciphers for reading and for writing, once both messages are through.
    pub fn finish(self) -> (Cipher, Cipher) {
        let state = Arc::new(self.0.into_stateless_transport_mode().expect("both messages are through"));
        (Cipher { state: state.clone(), records: 0 }, Cipher { state, records: 0 })
    }
}

impl Cipher {
    /// Encrypts a record into `sealed`, which has room for the tag; returns its length.
    pub fn seal(&mut self, plain: &[u8], sealed: &mut [u8]) -> usize {
        let length = self.state.write_message(self.records, plain, sealed);
        self.records += 1;
        length.expect("a record within its limit, into room enough")
    }

    /// Decrypts the next record into `plain`; `None` if it was forged, changed, or is not the next one.
    pub fn open(&mut self, sealed: &[u8], plain: &mut [u8]) -> Option<usize> {
        let length = self.state.read_message(self.records, sealed, plain).ok();
        self.records += 1;
        length
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(digit: &str) -> ClusterKey {
        ClusterKey::from_hex(&digit.repeat(64)).unwrap()
    }

    #[test]
    fn both_sides_must_know_the_key() {
        let (mut one, mut other) = (Handshake::new(&key("1"), true), Handshake::new(&key("2"), false));
        assert!(!other.read(&one.write()));
        let mut other = Handshake::new(&key("1"), false);
        assert!(other.read(&Handshake::new(&key("1"), true).write()));
        assert!(!one.read(&other.write()), "an answer to another's handshake");
    }

    #[test]
    fn records_cannot_be_changed_repeated_or_left_out() {
        let mut plain = [0; 32];
        let (mut receiver, [first, second]) = two_records();
        assert_eq!(receiver.open(&first, &mut plain), Some(5));
        assert_eq!(&plain[..5], b"first");
        assert_eq!(receiver.open(&second, &mut plain), Some(6));
        assert_eq!(&plain[..6], b"second");

        let (mut receiver, [first, _]) = two_records();
        assert_eq!(receiver.open(&first, &mut plain), Some(5));
        assert_eq!(receiver.open(&first, &mut plain), None, "repeated");

        let (mut receiver, [_, second]) = two_records();
        assert_eq!(receiver.open(&second, &mut plain), None, "the first left out");

        let (mut receiver, [mut first, _]) = two_records();
        first[2] ^= 1;
        assert_eq!(receiver.open(&first, &mut plain), None, "changed");
    }

    /// A fresh connection's receiving side, and what its sending side has sealed.
    fn two_records() -> (Cipher, [Vec<u8>; 2]) {
        let (mut one, mut other) = (Handshake::new(&key("1"), true), Handshake::new(&key("1"), false));
        assert!(other.read(&one.write()) && one.read(&other.write()));
        let ((_, mut sender), (receiver, _)) = (one.finish(), other.finish());
        let sealed = [&b"first"[..], b"second"].map(|text| {
            let mut record = vec![0; text.len() + TAG_BYTES];
            assert_eq!(sender.seal(text, &mut record), record.len());
            record
        });
        (receiver, sealed)
    }
}
