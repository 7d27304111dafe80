//! Whether a device responds at its BARs, and the mappings that the kernel removes when it does not.
//!
//! The kernel answers an access to a mapped BAR with SIGBUS while memory decoding is off in the command register or the
//! device is in a low-power state. Both change only through the configuration space, which this process alone writes:
//! VFIO gives a group or a device file to one process. So each access holds a lock for reading, each write of the
//! configuration space and each reset holds it for writing, and no access meets a BAR that is disabled.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};

use dmalane_dma::lock;

/// Offsets and bits of a configuration space (PCI Local Bus 3.0, 6.1; PCI Express Base, 7.5): the command register, and
/// the capabilities that set power states and reset the function.
pub(crate) const COMMAND: u64 = 4;
pub(crate) const COMMAND_MEMORY: u16 = 1 << 1;
const STATUS_CAPABILITIES: u8 = 1 << 4;
const POWER: u8 = 0x01;
const EXPRESS: u8 = 0x10;
const FEATURES: u8 = 0x13;
/// The standard part of a configuration space.
pub(crate) const STANDARD: usize = 256;

pub(crate) struct Gate {
    responds: RwLock<bool>,
    capabilities: Capabilities,
    /// Mappings that the kernel removes from an IOMMU as soon as the device does not respond.
    revocable: Mutex<Vec<Weak<Revocable>>>,
}

/// Where the configuration space has what disables the device for a while.
#[derive(Debug, Default, PartialEq, Eq)]
struct Capabilities {
    /// The byte with the power state.
    power: Option<usize>,
    /// Bytes, and their bits that reset the function.
    resets: Vec<(usize, u8)>,
}

impl Capabilities {
    fn of(space: &[u8; STANDARD]) -> Self {
        let mut found = Self::default();
        let mut at = usize::from(space[0x34] & !3);
        if space[6] & STATUS_CAPABILITIES == 0 {
            return found;
        }
        // A list that is a loop ends too.
        for _ in 0..48 {
            let (true, Some(next)) = (at >= 0x40, space.get(at + 1)) else { break };
            match space[at] {
                POWER => found.power = Some(at + 4),
                // The high byte of the device control register.
                EXPRESS => found.resets.push((at + 9, 1 << 7)),
                FEATURES => found.resets.push((at + 4, 1)),
                _ => {}
            }
            at = usize::from(next & !3);
        }
        found
    }
}

impl Gate {
    /// The gate of a device with this configuration space.
    pub(crate) fn new(space: &[u8; STANDARD]) -> Self {
        let capabilities = Capabilities::of(space);
        let command = u16::from_le_bytes([space[COMMAND as usize], space[COMMAND as usize + 1]]);
        let power = capabilities.power.and_then(|at| space.get(at)).copied();
        Self { responds: RwLock::new(responds(command, power)), capabilities, revocable: Mutex::default() }
    }

    /// Offset of the byte with the power state, in a device that has one.
    pub(crate) fn power(&self) -> Option<u64> {
        self.capabilities.power.map(|at| at as u64)
    }

    /// While the guard exists, the device responds or not, as it says.
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, bool> {
        self.responds.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// While the guard exists, no mapped BAR is accessed.
    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, bool> {
        self.responds.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the command register and the byte with the power state.
    pub(crate) fn update(&self, gate: &mut bool, command: u16, power: Option<u8>) {
        *gate = responds(command, power);
        if !*gate {
            self.revoke();
        }
    }

    /// True when writing these bytes resets the device.
    pub(crate) fn resets(&self, offset: u64, from: &[u8]) -> bool {
        let byte = |at: &usize| from.get((*at as u64).checked_sub(offset)? as usize);
        self.capabilities.resets.iter().any(|(at, bit)| byte(at).is_some_and(|byte| byte & bit != 0))
    }

    /// Ends the mappings that the kernel has removed: with a reset, or because the device does not respond.
    pub(crate) fn revoke(&self) {
        lock(&self.revocable).drain(..).filter_map(|mapping| mapping.upgrade()).for_each(|mapping| mapping.end());
    }

    /// Registers a mapping that the kernel will remove. The caller holds a guard, so that no reset comes first.
    pub(crate) fn register(&self, mapping: &Arc<Revocable>) {
        let mut all = lock(&self.revocable);
        all.retain(|mapping| mapping.strong_count() > 0);
        all.push(Arc::downgrade(mapping));
    }
}

fn responds(command: u16, power: Option<u8>) -> bool {
    const D3_HOT: u8 = 3;
    command & COMMAND_MEMORY != 0 && power.is_none_or(|power| power & 3 != D3_HOT)
}

/// A mapping in an IOMMU, counted in its container's bytes until it ends.
#[derive(Debug)]
pub(crate) struct Revocable {
    live: AtomicBool,
    bytes: u64,
    mapped: Arc<AtomicU64>,
}

impl Revocable {
    /// Counts a new mapping.
    pub(crate) fn new(bytes: u64, mapped: Arc<AtomicU64>) -> Self {
        mapped.fetch_add(bytes, Ordering::Relaxed);
        Self { live: AtomicBool::new(true), bytes, mapped }
    }

    pub(crate) fn is_live(&self) -> bool {
        self.live.load(Ordering::Acquire)
    }

    /// Counts it no longer, the first time that it is called.
    pub(crate) fn end(&self) {
        if self.live.swap(false, Ordering::AcqRel) {
            self.mapped.fetch_sub(self.bytes, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory decoding on, power management at 0x40, PCI Express at 0x50, advanced features at 0x80, which is the last.
    fn space() -> [u8; STANDARD] {
        let mut space = [0; STANDARD];
        (space[4], space[6], space[0x34]) = (2, STATUS_CAPABILITIES, 0x40);
        (space[0x40], space[0x41]) = (POWER, 0x50);
        (space[0x50], space[0x51]) = (EXPRESS, 0x80);
        space[0x80] = FEATURES;
        space
    }

    #[test]
    fn what_disables_a_device() {
        let gate = Gate::new(&space());
        assert_eq!(gate.power(), Some(0x44));
        let mapped = Arc::new(AtomicU64::new(0));
        let mapping = || {
            let mapping = Arc::new(Revocable::new(4096, mapped.clone()));
            gate.register(&mapping);
            mapping
        };
        let first = mapping();
        assert!(*gate.read() && first.is_live() && mapped.load(Ordering::Relaxed) == 4096);
        // Into D3hot and back.
        gate.update(&mut gate.write(), 2, Some(3));
        assert!(!*gate.read() && !first.is_live() && mapped.load(Ordering::Relaxed) == 0);
        gate.update(&mut gate.write(), 2, Some(0));
        assert!(*gate.read() && !first.is_live());
        let second = mapping();
        gate.update(&mut gate.write(), 4, Some(0));
        assert!(!*gate.read() && !second.is_live());
        second.end();
        assert_eq!(mapped.load(Ordering::Relaxed), 0, "counted once");
        // The bits that reset the function, in writes of any length.
        assert!(gate.resets(0x58, &[0, 0x80]) && gate.resets(0x59, &[0x80]) && gate.resets(0x80, &[0, 0, 0, 0, 1]));
        assert!(!gate.resets(0x58, &[0x80, 0]) && !gate.resets(0x5a, &[0x80]) && !gate.resets(4, &[0xff; 8]));
    }

    #[test]
    fn lists_of_capabilities() {
        let mut space = space();
        let found = Capabilities { power: Some(0x44), resets: vec![(0x59, 0x80), (0x84, 1)] };
        assert_eq!(Capabilities::of(&space), found);
        // A loop, an end outside of the space, and no list.
        space[0x81] = 0x40;
        assert_eq!(Capabilities::of(&space).power, Some(0x44));
        (space[0x34], space[0xfc], space[0xfd]) = (0xff, FEATURES, 0);
        assert_eq!(Capabilities::of(&space).resets, [(0x100, 1)]);
        assert!(!Gate::new(&space).resets(0xfc, &[0xff; 4]));
        space[6] = 0;
        assert_eq!(Capabilities::of(&space), Capabilities::default());
    }
}
