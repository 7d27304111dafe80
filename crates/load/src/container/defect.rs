//! Defects of a header, an index, a manifest, or the description of a tensor in it.

use dmalane_addr::FileOffset;
use dmalane_vm::trace::plain_json;
use thiserror::Error;

/// A defect of a header, an index, a manifest, or the description of a tensor in it. Texts are quoted from the file,
/// cut to 200 characters.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Defect {
    /// No JSON, or not with the required fields. The message is in plain words: parser errors name Rust types, so they
    /// are not shown.
    #[error("{}", plain_json(.0, "dtype"))]
    Json(serde_json::Error),
    /// It does not start with the magic number of its format, these bytes.
    #[error("it does not start with {0}")]
    NoMagic(&'static str),
    /// Its numbers are big-endian.
    #[error("it is a big-endian file, which is not supported")]
    BigEndian,
    /// A version of the format that is not supported.
    #[error("version {found} is not supported; {supported} are")]
    Version {
        /// The file's.
        found: u32,
        /// Those that are.
        supported: &'static str,
    },
    /// More bytes than this limit.
    #[error("it has more than the {0} bytes that are allowed")]
    TooLong(u64),
    /// More of something than the format, or this library, allows.
    #[error("{count} {what}, more than {limit}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many, or the first that is too many.
        count: u64,
        /// How many are allowed.
        limit: u64,
    },
    /// The file ends within the header.
    #[error("{len} bytes at {at} are beyond the end of the file")]
    CutOff {
        /// Where the next part of the header is.
        at: FileOffset,
        /// Its bytes.
        len: u64,
    },
    /// A number of things that the file has no bytes for.
    #[error("a count of {count} at {at} is more than the file can hold")]
    Count {
        /// The number.
        count: u64,
        /// Where it is.
        at: FileOffset,
    },
    /// A value, or an array of values, of a type that the format does not have.
    #[error("{what} of unknown type {kind} at {at}")]
    ValueType {
        /// "a value" or "an array".
        what: &'static str,
        /// The number of the type.
        kind: u32,
        /// Where it is.
        at: FileOffset,
    },
    /// The alignment of a GGUF file's tensors is not a multiple of 8.
    #[error("general.alignment is {0}, which is not a multiple of 8")]
    Alignment(u64),
    /// A tensor or a file of this name is there twice.
    #[error("{what} {name:?} is listed twice")]
    Twice {
        /// "tensor" or "file".
        what: &'static str,
        /// Its name.
        name: String,
    },
    /// A size that does not fit 64 bits.
    #[error("its size does not fit 64 bits")]
    Overflow,
    /// The size of a tensor of this shape does not fit 64 bits.
    #[error("the size of shape {0} overflows")]
    ShapeOverflow(String),
    /// A tensor does not start where its alignment asks for.
    #[error("offset {offset:#x} is not a multiple of {alignment}")]
    Unaligned {
        /// Where it starts.
        offset: u64,
        /// The alignment.
        alignment: u64,
    },
    /// A quantised tensor whose rows are not made of whole blocks, which have this number of elements.
    #[error("a row is not made of whole blocks of {0} elements")]
    PartialBlock(u64),
    /// A tensor starts within the one before it.
    #[error("it starts at data offset {start}, within tensor {before:?}, which ends at {end}")]
    Within {
        /// Where it starts.
        start: u64,
        /// The one before it.
        before: String,
        /// Where that ends.
        end: u64,
    },
    /// Bytes between two tensors.
    #[error("{len} bytes in front of its data offset {start} belong to no tensor")]
    Gap {
        /// How many.
        len: u64,
        /// Where the second tensor starts.
        start: u64,
    },
    /// A tensor ends before it starts.
    #[error("it ends at {end}, before it starts at {start} (data offsets)")]
    Backwards {
        /// Where it starts.
        start: usize,
        /// Where it ends.
        end: usize,
    },
    /// The type and shape of a tensor do not give its bytes.
    #[error("{elements} takes {bytes} bytes, but its data offsets {start}..{end} hold {}", end - start)]
    Misfit {
        /// The type and the shape.
        elements: String,
        /// Bytes of such a tensor.
        bytes: usize,
        /// Where it starts.
        start: usize,
        /// Where it ends.
        end: usize,
    },
    /// The type and shape of a tensor give no whole bytes.
    #[error("{elements} takes {bits} bits, which are no whole bytes")]
    PartialByte {
        /// The type and the shape.
        elements: String,
        /// Bits of such a tensor.
        bits: usize,
    },
    /// The header of an `.npy` file has no such field.
    #[error("it has no {0:?}")]
    NoField(&'static str),
    /// The elements of an `.npy` file are records.
    #[error("arrays of records are not supported")]
    Records,
    /// A type of elements that is not supported.
    #[error("the type {0:?} is not supported")]
    Dtype(String),
    /// The shape of an `.npy` file.
    #[error("its shape is not a tuple of numbers")]
    Shape,
    /// An index or a manifest of nothing.
    #[error("it lists no files")]
    NoFiles,
    /// An index names something else than a file in its own directory.
    #[error("{0:?} is not the name of a file beside it")]
    NotBeside(String),
    /// A name that leads out of the directory of a model, or that a reader could take for another.
    #[error("{0:?} is not a file name that a manifest may have")]
    BadName(String),
    /// A manifest of a later version of this program.
    #[error("it is of a newer version of dmalane")]
    Newer,
    /// JSON of another kind, or of an older version.
    #[error("schema {schema} and command {command:?}, not those of a manifest")]
    OtherJson {
        /// The version.
        schema: u64,
        /// The command that wrote it.
        command: String,
    },
    /// A manifest has a file of this size in bytes, which none has.
    #[error("its size, {0} bytes, is more than any file has")]
    FileSize(u64),
    /// A region of a manifest does not begin where the one before it ends.
    #[error("region {region} is {start}..{end}, and the one before it ends at {at}: regions follow without holes")]
    Hole {
        /// Its number.
        region: usize,
        /// Where it starts.
        start: u64,
        /// Where it ends.
        end: u64,
        /// Where the one before it ends.
        at: u64,
    },
    /// The regions of a manifest do not cover their file.
    #[error("its regions end at {at}, and it has {bytes} bytes")]
    Uncovered {
        /// Where they end.
        at: u64,
        /// Bytes of the file.
        bytes: u64,
    },
    /// A region for a tensor without a name.
    #[error("a tensor without a name")]
    NoName,
    /// A region of this kind with a name, which only tensors have.
    #[error("a {0} with a name")]
    Named(String),
    /// A region of a kind that there is not.
    #[error("kind {0:?}, not header, tensor or gap")]
    Kind(String),
    /// A hash that is none.
    #[error("{hash} is not {digits} hexadecimal digits")]
    Hash {
        /// Its name.
        hash: &'static str,
        /// How many digits it has.
        digits: usize,
    },
    /// In one file of a manifest.
    #[error("file {name:?}: {source}")]
    InFile {
        /// The file.
        name: String,
        /// What.
        source: Box<Defect>,
    },
    /// In one region of a file of a manifest.
    #[error("region {region}: {source}")]
    InRegion {
        /// Its number.
        region: usize,
        /// What.
        source: Box<Defect>,
    },
}

impl From<serde_json::Error> for Defect {
    fn from(error: serde_json::Error) -> Self {
        Self::Json(error)
    }
}
