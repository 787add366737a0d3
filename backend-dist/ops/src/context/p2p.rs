//! Point-to-point messages between the ranks of a group, on primitives. Nothing here waits for a GPU.

use burn::backend::{Backend, DType, Flex, Shape, TensorMetadata, flex::FlexTensor, tensor::FloatTensor as Float};

use ranks::comm::{Group, describe};

/// Point-to-point messages between the ranks of a group.
pub(crate) trait PointToPoint: Backend {
    /// A receive in progress.
    type Receiving;

    /// Connects neighbours in the ring of the group; the first call is a collective.
    fn link(group: &Group, like: &Float<Self>);

    /// Sends to rank `to` of the group; the host does not wait for it. Each rank receives its messages in the order in
    /// which all ranks send, and starts each receive at most two messages later.
    fn send_to(x: Float<Self>, to: usize, group: &Group);

    /// Starts to receive the next message of rank `from`. Receives from one rank are finished with
    /// [`received`](Self::received) in the order in which they were started.
    fn receive_from(like: &Float<Self>, shape: Shape, dtype: DType, from: usize, group: &Group) -> Self::Receiving;

    /// The tensor; work that is launched from now on waits for it.
    fn received(receiving: Self::Receiving) -> Float<Self>;
}

/// A message through the host, received when it is needed.
pub(crate) struct HostMessage {
    group: Group,
    from: usize,
    payload: String,
}

impl HostMessage {
    fn new(shape: &Shape, dtype: DType, from: usize, group: &Group) -> Self {
        Self { group: group.clone(), from, payload: describe(dtype, &shape.to_vec()) }
    }

    fn take(self) -> FlexTensor {
        self.group.receive(self.payload, self.from)
    }
}

impl PointToPoint for Flex {
    type Receiving = HostMessage;

    fn link(_group: &Group, _like: &FlexTensor) {}

    fn send_to(x: FlexTensor, to: usize, group: &Group) {
        group.send(x, to);
    }

    fn receive_from(_like: &FlexTensor, shape: Shape, dtype: DType, from: usize, group: &Group) -> HostMessage {
        HostMessage::new(&shape, dtype, from, group)
    }

    fn received(receiving: HostMessage) -> FlexTensor {
        receiving.take()
    }
}

#[cfg(feature = "cuda")]
mod gpu {
    use super::*;
    use burn::backend::Cube;
    use burn::backend::ops::FloatTensorOps;
    use burn_cubecl::tensor::CubeTensor;
    use ranks::nccl::p2p;

    /// Between linked GPUs a message overlaps the ranks' computation; elsewhere the host transfers it.
    pub(crate) enum Incoming {
        Gpu(Box<p2p::Receiving>),
        Host(HostMessage, cubecl::Device),
    }

    impl PointToPoint for Cube {
        type Receiving = Incoming;

        fn link(group: &Group, like: &CubeTensor) {
            p2p::connect_once(group, like);
        }

        fn send_to(x: CubeTensor, to: usize, group: &Group) {
            match p2p::link(group, group.rank(), to) {
                Some((pair, link)) => p2p::send_in_ring(x, &pair, &link),
                None => {
                    let data = burn::tensor::try_read_sync(Self::float_into_data(x));
                    let data =
                        data.expect("a CubeCL device reads synchronously").expect("the device gives its data back");
                    group.send(FlexTensor::from_data(data), to);
                }
            }
        }

        fn receive_from(like: &CubeTensor, shape: Shape, dtype: DType, from: usize, group: &Group) -> Incoming {
            match p2p::link(group, from, group.rank()) {
                Some((pair, link)) => Incoming::Gpu(Box::new(p2p::receive(like, shape, dtype, &pair, &link))),
                None => Incoming::Host(HostMessage::new(&shape, dtype, from, group), like.device.clone()),
            }
        }

        fn received(receiving: Incoming) -> CubeTensor {
            match receiving {
                Incoming::Gpu(receiving) => receiving.wait(),
                Incoming::Host(message, device) => Self::float_from_data(message.take().into_data(), &device),
            }
        }
    }
}

/// The ring of a group, which passes on keys and values, or their gradients.
pub(super) struct Ring<'a> {
    group: &'a Group,
}

impl<'a> Ring<'a> {
    pub fn new<B: PointToPoint>(group: &'a Group, like: &Float<B>) -> Self {
        B::link(group, like);
        Self { group }
    }

    /// The rank whose keys this rank has after `step` steps.
    pub fn holder(&self, step: usize) -> usize {
        (self.group.rank() + self.group.size() - step) % self.group.size()
    }

    pub fn send<B: PointToPoint>(&self, pair: &[Float<B>; 2]) {
        let next = (self.group.rank() + 1) % self.group.size();
        pair.iter().for_each(|x| B::send_to(x.clone(), next, self.group));
    }

    /// Starts to receive two tensors with the shapes of `like` from the previous rank.
    pub fn receive<B: PointToPoint>(&self, like: &[Float<B>; 2], dtype: DType) -> [B::Receiving; 2] {
        let before = (self.group.rank() + self.group.size() - 1) % self.group.size();
        like.each_ref().map(|x| B::receive_from(x, x.shape(), dtype, before, self.group))
    }
}

pub(super) fn received<B: PointToPoint>(pair: [B::Receiving; 2]) -> [Float<B>; 2] {
    pair.map(B::received)
}
