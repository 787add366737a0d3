//! Activations that wait in host memory for their backward pass.

use burn::tensor::{Device, Tensor, TensorData};

#[cfg(feature = "cuda")]
use super::locked::{Locked, LockedActivation, Returning};

/// Host memory of a rank for activations: page-locked where the device is a GPU, whose DMA copy engines write and read
/// it while the GPU computes.
///
/// On CPU ranks device and host have the same memory; activations are copied all the same.
#[derive(Debug, Default)]
pub struct ActivationMemory {
    #[cfg(feature = "cuda")]
    locked: Locked,
    /// Why some activations stay on the device.
    trouble: Option<String>,
}

/// An activation in host memory, or on its way there.
#[derive(Debug)]
pub struct HostActivation(Place);

#[derive(Debug)]
enum Place {
    Plain(TensorData, Device),
    #[cfg(feature = "cuda")]
    Locked(LockedActivation),
    /// There was no memory for it.
    #[cfg(feature = "cuda")]
    Device(Box<Tensor<3>>),
}

/// An activation on its way back.
#[derive(Debug)]
pub struct ReturningActivation(Return);

#[derive(Debug)]
enum Return {
    There(Tensor<3>),
    #[cfg(feature = "cuda")]
    Loading(Returning),
}

impl ActivationMemory {
    /// Queues the copy of an activation to the host. Its memory on the device is given back when
    /// [`LENT`](super::LENT) others have followed.
    pub fn store(&mut self, x: Tensor<3>) -> HostActivation {
        #[cfg(feature = "cuda")]
        if let Some(on_gpu) = super::locked::on_gpu(&x) {
            return HostActivation(match self.locked.store(on_gpu) {
                Ok(stored) => Place::Locked(stored),
                Err(error) => {
                    self.trouble.get_or_insert(error);
                    Place::Device(Box::new(x))
                }
            });
        }
        let device = x.device();
        HostActivation(Place::Plain(x.into_data(), device))
    }

    /// Queues the copy of an activation back to the device.
    pub fn load(&mut self, x: HostActivation) -> ReturningActivation {
        ReturningActivation(match x.0 {
            Place::Plain(data, device) => {
                let dtype = data.dtype();
                Return::There(Tensor::from_data(data, (&device, dtype)))
            }
            #[cfg(feature = "cuda")]
            Place::Locked(stored) => Return::Loading(self.locked.load(stored)),
            #[cfg(feature = "cuda")]
            Place::Device(x) => Return::There(*x),
        })
    }

    /// The activation; what is launched from here on waits for its copy.
    pub fn take(&mut self, x: ReturningActivation) -> Tensor<3> {
        match x.0 {
            Return::There(x) => x,
            #[cfg(feature = "cuda")]
            Return::Loading(returning) => self.locked.take(returning),
        }
    }

    /// Why some activations stay on the device, once.
    pub fn take_trouble(&mut self) -> Option<String> {
        self.trouble.take()
    }
}
