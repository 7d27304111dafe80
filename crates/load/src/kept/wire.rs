//! The messages between a keeper and its clients: JSON, a message each, over a Unix socket of type SEQPACKET.

use serde::{Deserialize, Serialize};

use super::times::KeptTimes;

/// The version of the protocol.
pub const VERSION: u32 = 1;
/// The longest message.
pub const MAX_MESSAGE: usize = 4096;
/// Most descriptors of a message.
pub const MAX_FDS: usize = 250;

/// A message with the version of who sends it.
#[derive(Serialize, Deserialize, Debug)]
pub struct Message<T> {
    /// [`VERSION`].
    pub version: u32,
    /// The message.
    #[serde(flatten)]
    pub body: T,
}

/// A question of a client.
#[derive(Serialize, Deserialize, Debug)]
#[serde(tag = "ask", rename_all = "snake_case")]
pub enum KeeperAsk {
    /// Lends a model: descriptors from number `from` on (the description, the manifest, the files).
    Attach {
        /// Its name, the beginning of its hash, or `USER:NAME`.
        name: String,
        /// The first descriptor that is wanted.
        from: usize,
        /// Of several of that name, rather the one in memory of this device; the one in the host's without.
        #[serde(default)]
        device: Option<String>,
    },
    /// Makes room for a model, which stays this connection's until it is kept or the connection ends.
    Room {
        /// Bytes of its files.
        bytes: u64,
        /// The files are in memory of a device, which not everybody may keep.
        #[serde(default)]
        on_device: bool,
    },
    /// Has models in memory of a device make room there: at least so many bytes, which are free soon after.
    DeviceRoom {
        /// The device.
        device: String,
        /// Bytes of it.
        bytes: u64,
        /// Of the model that comes: another one of its name makes room first.
        name: String,
    },
    /// Keeps a model, whose descriptors come with this message, and the ones after it while there are `more`.
    Keep {
        /// Further messages follow.
        more: bool,
    },
    /// Lends a model no more; who is attached keeps it.
    Drop {
        /// As of [`KeeperAsk::Attach`]; of the user's own.
        name: String,
    },
    /// Lists what is lent to this user.
    List,
}

/// An answer of the keeper.
#[non_exhaustive]
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum KeeperAnswer {
    /// Done.
    Done,
    /// A model is kept.
    Kept {
        /// The hash of another model, whose place it has taken.
        replaced: Option<String>,
    },
    /// The descriptors come with it.
    Lent {
        /// How many there are in all.
        of: usize,
        /// The number of the model: another one may have its name by the next message.
        number: u64,
    },
    /// A sealed memfd with the list comes with it: a [`KeptList`] as JSON.
    List,
    /// It is not done.
    Refused {
        /// Why.
        kind: KeepRefusal,
        /// The same in words.
        why: String,
    },
}

/// Why something is refused.
#[non_exhaustive]
#[derive(Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum KeepRefusal {
    /// No such model.
    Absent,
    /// Several models.
    Ambiguous,
    /// No room.
    Room,
    /// Its bytes are being compared with its manifest: ask again.
    Checking,
    /// Not as it should be.
    Bad,
}

/// What a keeper holds, for [`KeeperAsk::List`].
#[derive(Serialize, Deserialize, Debug, Clone, Default)]
pub struct KeptList {
    /// The models.
    pub models: Vec<KeptRow>,
    /// Bytes of all models, also those of other users.
    pub used: u64,
    /// The limit.
    pub limit: u64,
    /// Since the keeper began: models that were attached to, and that were asked for and not there.
    pub hits: u64,
    /// See `hits`.
    pub misses: u64,
    /// Models that made room for others.
    pub evicted: u64,
    /// How long models took to be kept.
    #[serde(default)]
    pub took: KeptTimes,
}

/// A model that is kept.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub struct KeptRow {
    /// Its name.
    pub name: String,
    /// Its hash.
    pub id: String,
    /// Whose it is.
    pub user: u32,
    /// The device in whose memory it is; `None` for host memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Bytes of its memory.
    pub bytes: u64,
    /// Files.
    pub files: usize,
    /// Lent to other users.
    pub shared: bool,
    /// Somebody is attached.
    pub attached: bool,
    /// How often it was attached to.
    pub attaches: u64,
    /// Seconds since it was last attached to or kept.
    pub idle_s: u64,
}

/// Reads a message, of which only the version is looked at first: another version may have other bodies.
///
/// # Errors
/// Why it is not understood.
pub fn parse<'t, T: Deserialize<'t>>(text: &'t [u8]) -> Result<T, String> {
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    let not_understood = |e: serde_json::Error| format!("it is not understood: {e}");
    match serde_json::from_slice::<Version>(text).map_err(not_understood)?.version {
        VERSION => serde_json::from_slice::<Message<T>>(text).map(|message| message.body).map_err(not_understood),
        other => Err(format!("it is of version {other} of the protocol, and not {VERSION}")),
    }
}
