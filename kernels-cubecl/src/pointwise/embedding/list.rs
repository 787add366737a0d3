//! The tokens of a bucket of ids in shared memory, sorted by id, and by token for equal ids.
//! An entry is the rest of the id (without its bucket), followed by the token. No two are equal, so their numerical
//! order does not depend on which unit finds them first.
use super::plan::Plan;
use cubecl::prelude::*;

/// Vectors of ids in flight for a unit.
const IN_FLIGHT: u32 = 4;

/// Whether two entries are of one id.
#[cube]
pub fn same_id(a: u32, b: u32, #[comptime] plan: Plan) -> bool {
    (a ^ b) >> comptime![plan.token_bits()] == 0
}

/// The entries of all tokens whose ids are in bucket `bucket`, in any order, and their number. Ids too large for an
/// entry all become the greatest value, which no table has.
#[cube]
pub fn collect<N: Size>(
    ids: &[Vector<i32, N>],
    list: &mut Shared<[u32]>,
    bucket: u32,
    tokens: u32,
    #[comptime] lanes: usize,
    #[comptime] plan: Plan,
) -> u32 {
    let found = Shared::<[Atomic<u32>]>::new_slice(1usize);
    if UNIT_POS == 0 {
        found[0].store(0u32);
    }
    sync_cube();
    let mask = comptime![plan.buckets - 1];
    let vectors = tokens / comptime![lanes as u32];
    let mut first = UNIT_POS;
    while first < vectors {
        let mut held = Array::<Vector<i32, N>>::new(comptime![IN_FLIGHT as usize]);
        #[unroll]
        for k in 0..comptime![IN_FLIGHT as usize] {
            let at = first + comptime![k as u32 * plan.units];
            held[k] = ids[min(at, vectors - 1) as usize];
        }
        #[unroll]
        for k in 0..comptime![IN_FLIGHT as usize] {
            let at = first + comptime![k as u32 * plan.units];
            let mut nearest = mask.runtime();
            #[unroll]
            for i in 0..lanes {
                nearest = min(nearest, (held[k].extract(i) as u32 ^ bucket) & mask);
            }
            if nearest == 0 && at < vectors {
                #[unroll]
                for i in 0..lanes {
                    let id = held[k].extract(i) as u32;
                    if (id ^ bucket) & mask == 0 {
                        let own = min(id / comptime![plan.buckets], comptime![plan.greatest()]);
                        let token = at * comptime![lanes as u32] + comptime![i as u32];
                        let place = found[0].fetch_add(1u32);
                        list[place as usize] = (own << comptime![plan.token_bits()]) | token;
                    }
                }
            }
        }
        first += comptime![IN_FLIGHT * plan.units];
    }
    sync_cube();
    found[0].load()
}

/// Sorts the first `count` entries. After them comes one whose id is in no table.
#[cube]
pub fn sort(list: &mut Shared<[u32]>, count: u32, #[comptime] plan: Plan) {
    if count <= comptime![plan.units] {
        let own = list[min(UNIT_POS, count - 1) as usize];
        let mut behind = UNIT_POS;
        while behind < 4 {
            list[(count + behind) as usize] = u32::MAX;
            behind += comptime![plan.units];
        }
        sync_cube();
        // A unit counts the entries before its own.
        let mut before = 0u32;
        if UNIT_POS < count {
            let mut at = 0u32;
            while at < count {
                #[unroll]
                for k in 0..4u32 {
                    before += select(list[(at + k) as usize] < own, 1u32, 0u32);
                }
                at += 4;
            }
        }
        sync_cube();
        if UNIT_POS < count {
            list[before as usize] = own;
        }
    } else {
        // Bitonic: the list is padded to a power of two.
        let mut size = comptime![plan.units].runtime();
        while size < count {
            size *= 2;
        }
        let mut at = count + UNIT_POS;
        while at < size + 4 {
            list[at as usize] = u32::MAX;
            at += comptime![plan.units];
        }
        sync_cube();
        let mut block = 2u32;
        while block <= size {
            let mut step = block / 2;
            while step > 0 {
                let mut pair = UNIT_POS;
                while pair < size / 2 {
                    let low = 2 * pair - pair % step;
                    let high = low + step;
                    let (a, b) = (list[low as usize], list[high as usize]);
                    let descends = low & block != 0;
                    if (a > b) != descends {
                        list[low as usize] = b;
                        list[high as usize] = a;
                    }
                    pair += comptime![plan.units];
                }
                sync_cube();
                step /= 2;
            }
            block *= 2;
        }
    }
    sync_cube();
}
