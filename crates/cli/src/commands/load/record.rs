//! The trace of what a load binds.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use dmalane::OpenDevice;
use dmalane::vm::trace::{Recorder, TraceHeader};

use crate::failure::Failure;

/// A trace that is being recorded. It is held in memory, as a load that fails leaves nothing behind.
pub struct Recording {
    recorder: Arc<Mutex<io::Result<Recorder<Vec<u8>>>>>,
}

impl Recording {
    /// Records what is bound on a device from now on.
    pub fn of(device: &mut OpenDevice) -> Result<Self, Failure> {
        let space = device.address_space();
        let Some(vm) = space.vm() else {
            return Err(Failure::usage("--record is for devices with an MMU: on this one nothing is bound"));
        };
        // Without a range, formats with shorter addresses can replay it too, if they hold what is bound.
        let header = TraceHeader { format: Some(vm.format().to_owned()), ..TraceHeader::default() };
        let recorder = Arc::new(Mutex::new(Recorder::new(Vec::new(), &header)));
        let shared = recorder.clone();
        space.observe(Box::new(move |requests| {
            let mut recorder = shared.lock().unwrap_or_else(PoisonError::into_inner);
            if let Ok(ok) = &mut *recorder
                && let Err(error) = ok.record(requests)
            {
                *recorder = Err(error);
            }
        }));
        Ok(Self { recorder })
    }

    /// The trace of what was recorded so far.
    pub fn finish(self) -> Result<Vec<u8>, Failure> {
        let mut recorder = self.recorder.lock().unwrap_or_else(PoisonError::into_inner);
        // Later operations are not part of the trace.
        let recorded = std::mem::replace(&mut *recorder, Err(io::Error::other("the trace has ended")));
        recorded.and_then(Recorder::finish).map_err(|e| Failure::because("cannot record", &e))
    }
}
