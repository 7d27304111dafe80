//! Each error of a chain says something that those before it do not.

use std::error::Error;
use std::io;
use std::path::PathBuf;

use dmalane::addr::{CardAddr, DeviceVa, FileOffset, RangeError, SgError, Span};
use dmalane::device::contents::LockError;
use dmalane::device::{IoError, MemoryError, Placement, SpaceError};
use dmalane::file::{Fallback, FileDeviceError};
use dmalane::load::fill::FillError;
use dmalane::load::kept::KeepError;
use dmalane::queue::{DeviceAddr, OpError, Refusal, RunError, StopReason};
use dmalane::validate::{Phase, ValidateError};
use dmalane::{BadDeviceSpec, CardServerError, OpenError, PciCardError};
use dmalane::{card, cuda, daemon, dma, error_chain, file, load, sim, slash, vfio, vfio_user, vm, vulkan};
use rustix::io::Errno;

type Boxed = Box<dyn Error + Send + Sync>;

/// An error with its causes.
fn texts(error: &dyn Error) -> Vec<String> {
    std::iter::successors(Some(error), |&e| e.source()).map(ToString::to_string).collect()
}

fn why() -> io::Error {
    io::Error::other("why")
}

fn boxed() -> Boxed {
    "why".into()
}

fn stop() -> StopReason {
    StopReason::Driver(why().into())
}

fn failed() -> OpError {
    OpError::Stopped(stop())
}

/// One value of every variant that holds another error.
fn all() -> Vec<Boxed> {
    let path = || PathBuf::from("model.safetensors");
    let (at, tensor) = (FileOffset::new(4096), || Some("weight".to_owned()));
    let memory = || dma::Error::Allocate { len: 4096, kind: "anonymous memory", source: why() };
    let backend = || dma::Error::Backend(boxed());
    let refused = || MemoryError::Driver { len: 4096, placement: Placement::HBM, source: boxed() };
    let va = DeviceVa::new(0x1000);
    let span = Span::new(CardAddr::new(0x1000), 4096).unwrap();
    let tables = || dmalane::iopt::Error::Empty { at: dmalane::iopt::NamedAddr::of(va) };
    let unmapped = || vm::Error::Segment { va, bo: 1, source: tables() };
    let format = load::Manifest::parse(b"{").unwrap_err();
    let call = vulkan::CallError { call: "vkAllocateMemory", result: Default::default() };
    let cuda_call = || cuda::Error::Symbol { library: "libcuda.so.1".into(), symbol: "cuInit" };
    let peer = || dma::PeerError::Untrusted { uid: 1, trusted: vec![2] };
    let slash_call = || slash::Error::Call { call: "INFO", source: io::Error::from_raw_os_error(25) };
    let spec = || BadDeviceSpec::Rest { text: "pci:x".into(), syntax: "pci:ADDRESS", source: boxed() };
    vec![
        memory().into(),
        dma::Error::Import(why()).into(),
        backend().into(),
        dma::PeerError::Unknown(Errno::PERM).into(),
        stop().into(),
        StopReason::Device(boxed().into()).into(),
        StopReason::Protocol(boxed().into()).into(),
        StopReason::Lost(boxed().into()).into(),
        failed().into(),
        OpError::Refused(Refusal::Stopped(stop())).into(),
        RunError::<DeviceAddr> { operation: None, error: failed() }.error.into(),
        file::Error::Open { path: path(), source: why() }.into(),
        file::Error::NoDirect { path: path(), source: Fallback::Few(1) }.into(),
        file::Error::NoUring { path: path(), source: Fallback::OldRing }.into(),
        FileDeviceError::Open { path: path(), what: "reading", source: why() }.into(),
        FileDeviceError::NoDirect { path: path(), source: Fallback::Few(1) }.into(),
        FileDeviceError::NoQueue(why()).into(),
        refused().into(),
        MemoryError::Range(RangeError::NotFree(span)).into(),
        SpaceError::Vm(unmapped()).into(),
        SpaceError::Invalidate(boxed()).into(),
        SpaceError::Refused(boxed()).into(),
        SpaceError::Driver(boxed()).into(),
        LockError::Failed(why()).into(),
        IoError::Memory(backend()).into(),
        IoError::Failed { at: DeviceAddr::Card(CardAddr::new(0)), error: failed() }.into(),
        load::Error::Format { path: path(), source: format }.into(),
        load::Error::File { path: path(), what: "read its size", source: why() }.into(),
        load::Error::Open(file::Error::Open { path: path(), source: why() }).into(),
        load::Error::Read { path: path(), at, tensor: tensor(), source: failed() }.into(),
        load::Error::Transfer { path: path(), at, tensor: None, source: failed() }.into(),
        load::Error::DeviceMemory { path: path(), source: refused() }.into(),
        load::Error::OwnMemory { path: path() }.into(),
        load::Error::Index { path: path(), source: SgError::TooLong }.into(),
        load::Error::Bind { path: path(), tensor: tensor(), source: SpaceError::Driver(boxed()) }.into(),
        load::Error::Memory(memory()).into(),
        load::Error::Fill(FillError::Memory { buffer: 1, source: memory() }).into(),
        FillError::Read { source_index: 1, at, error: failed() }.into(),
        FillError::Transfer { buffer: 1, offset: 4096, error: failed() }.into(),
        KeepError::NoKeeper { path: path(), source: why() }.into(),
        KeepError::Peer(peer()).into(),
        KeepError::Device { what: "lend its memory", source: boxed() }.into(),
        KeepError::System { what: "seal its memory", source: why() }.into(),
        load::Error::Kept(KeepError::System { what: "seal its memory", source: why() }).into(),
        card::Error::Bus(backend()).into(),
        card::Error::Vm(unmapped()).into(),
        vm::PlanError { index: 1, error: unmapped() }.into(),
        sim::Error::Memory(memory()).into(),
        sim::Error::NoMemory { at: CardAddr::new(0), source: why() }.into(),
        sim::Error::NoThread(why()).into(),
        vfio::Error::Kernel { what: "open /dev/vfio/1".into(), source: why() }.into(),
        vfio::Error::Refused(memory()).into(),
        vfio_user::Error::WrongServer { path: path(), source: peer() }.into(),
        daemon::ServerError::Listen { path: path(), source: why() }.into(),
        daemon::ServerError::Io(why()).into(),
        daemon::ClientError::Connect { path: path(), source: Errno::NOENT }.into(),
        daemon::ClientError::WrongServer { path: path(), source: peer() }.into(),
        daemon::ClientError::System { what: "cannot send", source: Errno::PIPE }.into(),
        vulkan::Error::Descriptor(why()).into(),
        vulkan::Error::NoMemory { len: 4096, free: None, source: call }.into(),
        vulkan::Error::Lost(call).into(),
        vulkan::Error::Call(call).into(),
        cuda::Error::Lost(Box::new(cuda_call())).into(),
        slash_call().into(),
        slash::Error::Open { path: path(), source: io::Error::from_raw_os_error(2) }.into(),
        slash::Error::Vrtd { socket: path(), source: io::Error::from_raw_os_error(2) }.into(),
        slash::Error::WrongServer { socket: path(), source: peer() }.into(),
        slash::Error::NoBegin(why()).into(),
        slash::Error::NoEnd(why()).into(),
        slash::Error::Unknown { len: 4096, at: CardAddr::new(0), source: Box::new(slash_call()) }.into(),
        slash::Error::Unstoppable { failure: Box::new(slash_call()), stopping: io::Error::other("busy") }.into(),
        slash::Error::Map(why()).into(),
        slash::Error::Thread(why()).into(),
        ValidateError::Memory(memory()).into(),
        ValidateError::DeviceMemory(refused()).into(),
        ValidateError::Lock(LockError::Failed(why())).into(),
        ValidateError::Contents(why()).into(),
        ValidateError::Thread(why()).into(),
        ValidateError::Refused { at: CardAddr::new(0), reason: Refusal::Stopped(stop()) }.into(),
        ValidateError::Failed { phase: Phase::Ddr, thread: 1, what: "reading", at: CardAddr::new(0), error: failed() }
            .into(),
        ValidateError::Halted { phase: Phase::Ddr, thread: 1, why: stop() }.into(),
        ValidateError::Reference(why()).into(),
        ValidateError::DriverCopies(boxed()).into(),
        spec().into(),
        OpenError::Spec(spec()).into(),
        OpenError::Device { spec: "ram:2MiB".parse().unwrap(), source: boxed() }.into(),
        OpenError::Drive(load::Error::Memory(backend())).into(),
        PciCardError::Vfio(vfio::Error::Kernel { what: "open".into(), source: why() }).into(),
        PciCardError::VfioUser(vfio_user::Error::Setup(why())).into(),
        CardServerError::Listen { path: path(), source: why() }.into(),
        CardServerError::Accept(why()).into(),
        CardServerError::Card(sim::Error::NoThread(why())).into(),
    ]
}

#[test]
fn no_error_repeats_its_source() {
    for error in all() {
        let texts = texts(&*error);
        for (i, text) in texts.iter().enumerate() {
            assert!(texts[i + 1..].iter().all(|cause| !text.contains(cause)), "{error:?} says: {texts:#?}");
        }
        assert_eq!(error_chain(&*error), texts.join(": "));
    }
}
