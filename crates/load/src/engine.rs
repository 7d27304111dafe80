//! The engine over files: a worker for each queue, and errors with the file and the tensor that they are about.

use std::path::PathBuf;

use dmalane_addr::FileOffset;
use dmalane_queue::OpError;

use crate::container::Model;
use crate::error::Error;
use crate::fill::FillError;
use crate::input::Input;

/// The queues of each worker, of which there are as many as every input has queues; and whether all inputs were seen to
/// have latency: one may have waited for a processor.
pub(crate) fn queues<S>(inputs: &mut [Input<S>]) -> (Vec<Vec<&mut S>>, bool) {
    let late = inputs.iter().all(|input| input.source.is_late());
    let more = inputs.iter().map(|input| input.more.len()).min().unwrap_or(0);
    let mut workers: Vec<Vec<&mut S>> = (0..=more).map(|_| Vec::new()).collect();
    for input in inputs {
        for (worker, queue) in workers.iter_mut().zip([&mut input.queue].into_iter().chain(&mut input.more)) {
            worker.push(queue);
        }
    }
    (workers, late)
}

/// An error of the engine with the file and the tensor that it is about. `about` returns the path and the contents of a
/// file.
pub(crate) fn describe<'a>(error: FillError, about: impl Fn(usize) -> (PathBuf, Option<&'a Model>)) -> Error {
    let named = |file: usize, at| {
        let (path, model) = about(file);
        (path, model.and_then(|model| Some(model.tensor_at(at)?.name.clone())))
    };
    match error {
        FillError::Read { source_index, at, error: source } => {
            // The queue knows best where it stopped.
            let at = match &source {
                OpError::EndOfFile { at, .. } | OpError::Io { at, .. } => *at,
                _ => at,
            };
            let (path, tensor) = named(source_index, at);
            Error::Read { path, at, tensor, source }
        }
        FillError::Transfer { buffer, offset, error: source } => {
            let at = FileOffset::new(offset);
            let (path, tensor) = named(buffer, at);
            Error::Transfer { path, at, tensor, source }
        }
        FillError::Memory { source, .. } => Error::Memory(source),
        other => Error::Fill(other),
    }
}
