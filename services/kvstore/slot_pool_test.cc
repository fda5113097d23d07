#include "services/kvstore/slot_pool.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/core/status.h"
#include "tests/support/store_harness.h"

namespace certkv::kvstore {
namespace {

std::shared_ptr<SlabMemory> MakeMemory(SlabKind kind, int32_t slot_count) {
  return *SlabMemory::Create(TinySpec(), kind, slot_count);
}

TEST(SlabMemoryTest, ExportsASlabThatReadersMapReadOnly) {
  const auto memory = MakeMemory(SlabKind::kDevice, 3);
  const auto mapping = Mapping::Map(memory->export_fd(), Mapping::Access::kReadOnly);
  ASSERT_TRUE(mapping.ok()) << mapping.status();
  EXPECT_TRUE(memory->layout().CheckHeader(mapping->data(), mapping->size_bytes()).ok());
  memory->base()[memory->layout().scan_offset(1, 0, 0, 0)] = 77;
  EXPECT_EQ(mapping->data()[memory->layout().scan_offset(1, 0, 0, 0)], 77);
}

TEST(SlabMemoryTest, RefusesEveryWayToWriteASealedSlab) {
  for (const SlabKind kind : {SlabKind::kDevice, SlabKind::kBacking}) {
    const auto memory = MakeMemory(kind, 2);
    const int fd = memory->export_fd();
    const auto writable = Mapping::Map(fd, Mapping::Access::kReadWrite);
    ASSERT_FALSE(writable.ok());
    EXPECT_EQ(ReasonOf(writable.status()), "MAP_FAILED");
    EXPECT_LT(write(fd, "x", 1), 0);
    EXPECT_NE(ftruncate(fd, 0), 0);
    // The owner of the same user may open the file again for writing; the seal still holds.
    const std::string path = "/proc/self/fd/" + std::to_string(fd);
    const UniqueFd reopened(open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (reopened.valid()) {
      EXPECT_FALSE(Mapping::Map(reopened.get(), Mapping::Access::kReadWrite).ok());
      EXPECT_LT(write(reopened.get(), "x", 1), 0);
      EXPECT_NE(fallocate(reopened.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), 0);
    }
  }
}

TEST(SlabMemoryDeathTest, KillsAReaderThatWrites) {
  const auto memory = MakeMemory(SlabKind::kDevice, 2);
  const Mapping mapping = *Mapping::Map(memory->export_fd(), Mapping::Access::kReadOnly);
  EXPECT_DEATH(mapping.data()[5000] = 1, "");
  EXPECT_NE(mprotect(mapping.data(), 4096, PROT_READ | PROT_WRITE), 0);
}

TEST(SlabMemoryTest, ExportsStagingMemoryWritable) {
  const auto memory = MakeMemory(SlabKind::kStaging, 2);
  const Mapping mapping = *Mapping::Map(memory->export_fd(), Mapping::Access::kReadWrite);
  mapping.data()[memory->layout().key_offset(1, 0, 0)] = 9;
  EXPECT_EQ(memory->base()[memory->layout().key_offset(1, 0, 0)], 9);
  const UniqueFd read_only = *memory->OpenReadOnly();
  EXPECT_FALSE(Mapping::Map(read_only.get(), Mapping::Access::kReadWrite).ok());
  EXPECT_TRUE(Mapping::Map(read_only.get(), Mapping::Access::kReadOnly).ok());
}

class SlotPoolTest : public testing::Test {
 protected:
  SlotPool pool_{MakeMemory(SlabKind::kDevice, 4)};

  uint64_t Generation(int32_t slot) {
    return GenerationAt(pool_.base(), pool_.layout(), slot).load();
  }
};

TEST_F(SlotPoolTest, GenerationIsOddUntilSealedAndAfterFree) {
  EXPECT_EQ(Generation(0) % 2, 1u);
  const int32_t slot = pool_.Take(1)[0];
  EXPECT_EQ(Generation(slot) % 2, 1u);
  const SlotRef ref = pool_.Seal(slot);
  EXPECT_EQ(ref.generation % 2, 0u);
  EXPECT_EQ(Generation(slot), ref.generation);
  EXPECT_EQ(pool_.RefOf(slot), ref);
  pool_.Free(slot);
  EXPECT_EQ(Generation(slot) % 2, 1u);
}

TEST_F(SlotPoolTest, ReferenceIsStaleAfterFreeAndNeverComesBack) {
  std::vector<SlotRef> seen;
  for (int i = 0; i < 50; ++i) {
    const int32_t slot = pool_.Take(1)[0];
    const SlotRef ref = pool_.Seal(slot);
    for (const SlotRef& old : seen) EXPECT_NE(ref, old);
    EXPECT_TRUE(GenerationMatches(pool_.base(), pool_.layout(), ref));
    pool_.Free(slot);
    EXPECT_FALSE(GenerationMatches(pool_.base(), pool_.layout(), ref));
    EXPECT_FALSE(GenerationStillMatches(pool_.base(), pool_.layout(), ref));
    seen.push_back(ref);
  }
}

TEST_F(SlotPoolTest, AbortedSlotIsFreeAgainWithoutAReference) {
  const std::vector<int32_t> slots = pool_.Take(4);
  EXPECT_EQ(slots, (std::vector<int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(pool_.free_count(), 0);
  for (const int32_t slot : slots) pool_.Free(slot);
  EXPECT_EQ(pool_.free_count(), 4);
  EXPECT_EQ(pool_.Take(3), (std::vector<int32_t>{1, 2, 3}));
}

TEST_F(SlotPoolTest, GivesSlotsInAddressOrderAfterAnyHistory) {
  for (const int32_t slot : pool_.Take(4)) pool_.Seal(slot);
  for (const int32_t slot : {2, 0, 3}) pool_.Free(slot);
  EXPECT_EQ(pool_.Take(3), (std::vector<int32_t>{0, 2, 3}));
}

using SlotPoolDeathTest = SlotPoolTest;

TEST_F(SlotPoolDeathTest, RefusesWrongTransitions) {
  const int32_t slot = pool_.Take(1)[0];
  EXPECT_DEATH((void)pool_.RefOf(slot), "only sealed slots");
  EXPECT_DEATH((void)pool_.Take(4), "only free slots");
  pool_.Seal(slot);
  EXPECT_DEATH((void)pool_.Seal(slot), "being written");
  pool_.Free(slot);
  EXPECT_DEATH(pool_.Free(slot), "not freed again");
  EXPECT_DEATH(SlotPool(MakeMemory(SlabKind::kStaging, 1)), "no generations");
}

}  // namespace
}  // namespace certkv::kvstore
