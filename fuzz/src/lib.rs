//! Fuzz targets, each a function of bytes that panics where something is wrong. Two programs run them: `libfuzzer`,
//! guided by coverage (`scripts/fuzz`), and `replay`, which runs seeds and changed seeds in any build.

mod script;

use arbitrary::{Arbitrary, Unstructured};

macro_rules! targets {
    ($($name:ident)*) => {
        mod targets {
            $(pub mod $name;)*
        }

        /// Every target by its name.
        pub const TARGETS: &[(&str, fn(&[u8]))] = &[$((stringify!($name), targets::$name::target)),*];
    };
}

targets! {
    c_interface card_config card_driver card_ring daemon_client daemon_message daemon_server daemon_worker gguf
    header_cost iopt iopt_image npy safetensors sg_range shared_queue split_queue vfio_user vfio_user_client vm_array
}

/// The target of that name.
pub fn target(name: &str) -> Option<fn(&[u8])> {
    TARGETS.iter().find(|(known, _)| *known == name).map(|(_, target)| *target)
}

/// The bytes as a value, for targets whose inputs have a structure; `None` where they are too few.
fn structured<'a, T: Arbitrary<'a>>(bytes: &'a [u8]) -> Option<T> {
    T::arbitrary_take_rest(Unstructured::new(bytes)).ok()
}

/// The memory of the whole process, which `header_cost` measures.
#[global_allocator]
static MEMORY: peak_alloc::PeakAlloc = peak_alloc::PeakAlloc;

/// A name in the folder for temporary files that no other process of this machine has.
fn socket_path(name: &str) -> std::path::PathBuf {
    std::env::temp_dir().join(format!("dmalane-fuzz-{name}-{}", std::process::id()))
}

/// Sends one message with descriptors; errors are the other side's business.
fn send(socket: impl std::os::fd::AsFd, message: &[u8], fds: &[std::os::fd::BorrowedFd<'_>]) -> bool {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(80))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "at most 80");
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendmsg(socket, &[std::io::IoSlice::new(message)], &mut control, flags).is_ok()
}
