//! The state of a device, moved from one process to another: the client's side of live migration.

use std::io::{Read, Write};

use vfio_bindings::bindings::vfio as abi;

use crate::client::UserBus;
use crate::wire::{Body, Command, Fields, MAX_PUSHED};
use crate::{Error, ProtocolError};

const STOP: u32 = abi::vfio_device_mig_state_VFIO_DEVICE_STATE_STOP;
const RUNNING: u32 = abi::vfio_device_mig_state_VFIO_DEVICE_STATE_RUNNING;
const SAVING: u32 = abi::vfio_device_mig_state_VFIO_DEVICE_STATE_STOP_COPY;
const RESTORING: u32 = abi::vfio_device_mig_state_VFIO_DEVICE_STATE_RESUMING;

impl UserBus {
    /// Stops the device, and saves its state: all that its process needs to continue elsewhere. Mappings and
    /// interrupts are the client's. The device stays stopped until [`UserBus::resume`]. How much there is, the process
    /// says by sending it: `into` has to refuse what is too much.
    ///
    /// # Errors
    /// [`Error::Refused`] by a process that saves no state, as `dmalane card serve`; [`Error::Unanswered`],
    /// [`Error::Protocol`]; [`Error::State`] of `into`.
    pub fn save(&self, mut into: impl Write) -> Result<(), Error> {
        self.set_state(SAVING)?;
        loop {
            let most = self.max_data() as u32;
            let answer = self.ask(Command::MigrationRead, Body::default().u32(8 + most).u32(most))?;
            let len = Fields(answer.get(4..).unwrap_or_default()).u32().filter(|len| *len <= most);
            let data =
                answer.get(8..).filter(|data| len == Some(data.len() as u32)).ok_or(ProtocolError::ReadLength)?;
            into.write_all(data).map_err(Error::State)?;
            if data.len() < most as usize {
                return self.set_state(STOP);
            }
        }
    }

    /// Stops the device and gives it a state that [`UserBus::save`] has saved, of another process maybe. It stays
    /// stopped until [`UserBus::resume`].
    ///
    /// # Errors
    /// As [`UserBus::save`]; [`Error::Refused`] also for a state that the process does not understand.
    pub fn restore(&self, mut from: impl Read) -> Result<(), Error> {
        self.set_state(RESTORING)?;
        let mut chunk = Vec::new();
        loop {
            chunk.clear();
            let most = self.max_data().min(MAX_PUSHED);
            let len = from.by_ref().take(most as u64).read_to_end(&mut chunk).map_err(Error::State)? as u32;
            if len == 0 {
                return self.set_state(STOP);
            }
            self.ask(Command::MigrationWrite, Body::default().u32(8 + len).u32(len).bytes(&chunk))?;
        }
    }

    /// Lets a device run that was stopped by [`UserBus::save`] or [`UserBus::restore`].
    ///
    /// # Errors
    /// As [`UserBus::save`].
    pub fn resume(&self) -> Result<(), Error> {
        self.set_state(RUNNING)
    }

    fn set_state(&self, state: u32) -> Result<(), Error> {
        let flags = abi::VFIO_DEVICE_FEATURE_SET | abi::VFIO_DEVICE_FEATURE_MIG_DEVICE_STATE;
        // The last word is a descriptor in the kernel's interface, and nothing here.
        self.ask(Command::Feature, Body::default().u32(16).u32(flags).u32(state).u32(0)).map(drop)
    }
}
