//! Tensors from one member of a group to another, on primitives. Nothing here waits for a GPU.

use burn::backend::{Backend, DType, Flex, Shape, TensorMetadata, flex::FlexTensor, tensor::FloatTensor};

use crate::comm::{Group, describe};

/// Messages between the members of a group.
pub(crate) trait Neighbours: Backend {
    /// A tensor on its way here.
    type Arriving;

    /// Links neighbours in the ring of the members; collective when it is called for the first time.
    fn link(group: &Group, like: &FloatTensor<Self>);

    /// Sends to member `to` in a ring of the members; the host does not wait for it. Each rank receives what it is sent
    /// in the order in which all of them send, and starts to no more than two messages later.
    fn post(x: FloatTensor<Self>, to: usize, group: &Group);

    /// Starts to receive what member `from` sends next. What comes from one member is taken in with
    /// [`arrived`](Self::arrived) in the order in which it was started.
    fn expect(like: &FloatTensor<Self>, shape: Shape, dtype: DType, from: usize, group: &Group) -> Self::Arriving;

    /// The tensor; what is issued from now on waits for it.
    fn arrived(arriving: Self::Arriving) -> FloatTensor<Self>;
}

/// A message that is taken from the mail when it is needed.
pub(crate) struct Mail {
    group: Group,
    from: usize,
    payload: String,
}

impl Mail {
    fn new(shape: &Shape, dtype: DType, from: usize, group: &Group) -> Self {
        Self { group: group.clone(), from, payload: describe(dtype, &shape.to_vec()) }
    }

    fn take(self) -> FlexTensor {
        self.group.receive(self.payload, self.from)
    }
}

impl Neighbours for Flex {
    type Arriving = Mail;

    fn link(_group: &Group, _like: &FlexTensor) {}

    fn post(x: FlexTensor, to: usize, group: &Group) {
        group.send(x, to);
    }

    fn expect(_like: &FlexTensor, shape: Shape, dtype: DType, from: usize, group: &Group) -> Mail {
        Mail::new(&shape, dtype, from, group)
    }

    fn arrived(arriving: Mail) -> FlexTensor {
        arriving.take()
    }
}

#[cfg(feature = "cuda")]
mod gpu {
    use super::*;
    use crate::nccl::pairs;
    use burn::backend::Cube;
    use burn::backend::ops::FloatTensorOps;
    use burn_cubecl::tensor::CubeTensor;

    /// Between linked GPUs a message runs beside what the ranks compute; elsewhere the host carries it.
    pub(crate) enum Incoming {
        Gpu(Box<pairs::Arriving>),
        Host(Mail, cubecl::Device),
    }

    impl Neighbours for Cube {
        type Arriving = Incoming;

        fn link(group: &Group, like: &CubeTensor) {
            pairs::connect_once(group, like);
        }

        fn post(x: CubeTensor, to: usize, group: &Group) {
            match pairs::link(group, group.rank(), to) {
                Some((pair, link)) => pairs::send_round(x, &pair, &link),
                None => {
                    let data = burn::tensor::try_read_sync(Self::float_into_data(x));
                    let data =
                        data.expect("a CubeCL device reads synchronously").expect("the device gives its data back");
                    group.send(FlexTensor::from_data(data), to);
                }
            }
        }

        fn expect(like: &CubeTensor, shape: Shape, dtype: DType, from: usize, group: &Group) -> Incoming {
            match pairs::link(group, from, group.rank()) {
                Some((pair, link)) => Incoming::Gpu(Box::new(pairs::receive(like, shape, dtype, &pair, &link))),
                None => Incoming::Host(Mail::new(&shape, dtype, from, group), like.device.clone()),
            }
        }

        fn arrived(arriving: Incoming) -> CubeTensor {
            match arriving {
                Incoming::Gpu(arriving) => arriving.wait(),
                Incoming::Host(mail, device) => Self::float_from_data(mail.take().into_data(), &device),
            }
        }
    }
}

/// Keys and values, or their gradients, of one rank after the other, in the ring of a group.
pub(super) struct Ring<'a> {
    group: &'a Group,
}

impl<'a> Ring<'a> {
    pub fn new<B: Neighbours>(group: &'a Group, like: &FloatTensor<B>) -> Self {
        B::link(group, like);
        Self { group }
    }

    /// The rank whose keys this rank has after `step` steps.
    pub fn holder(&self, step: usize) -> usize {
        (self.group.rank() + self.group.size() - step) % self.group.size()
    }

    pub fn send<B: Neighbours>(&self, pair: &[FloatTensor<B>; 2]) {
        let next = (self.group.rank() + 1) % self.group.size();
        pair.iter().for_each(|x| B::post(x.clone(), next, self.group));
    }

    /// Starts to receive what the rank before sends next: two tensors as these.
    pub fn expect<B: Neighbours>(&self, like: &[FloatTensor<B>; 2], dtype: DType) -> [B::Arriving; 2] {
        let before = (self.group.rank() + self.group.size() - 1) % self.group.size();
        like.each_ref().map(|x| B::expect(x, x.shape(), dtype, before, self.group))
    }
}

pub(super) fn arrived<B: Neighbours>(pair: [B::Arriving; 2]) -> [FloatTensor<B>; 2] {
    pair.map(B::arrived)
}
