#include "kernels/core/status.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/cord.h"
#include "gtest/gtest.h"
#include "kernels/core/check.h"

namespace certkv {
namespace {

using absl::StatusCode;

TEST(StatusTest, ErrorCarriesCodeReasonAndMessage) {
  const absl::Status status =
      MakeError(StatusCode::kDataLoss, "CRC_MISMATCH", "block 7 is damaged");
  EXPECT_EQ(status.code(), StatusCode::kDataLoss);
  EXPECT_EQ(ReasonOf(status), "CRC_MISMATCH");
  EXPECT_EQ(status.message(), "block 7 is damaged");
}

TEST(StatusTest, ReasonIsEmptyWithoutOne) {
  EXPECT_EQ(ReasonOf(absl::OkStatus()), "");
  EXPECT_EQ(ReasonOf(absl::InternalError("no reason")), "");
}

TEST(StatusTest, ContextKeepsCodeReasonAndOtherPayloads) {
  absl::Status status = MakeError(StatusCode::kNotFound, "BLOCK_NOT_FOUND", "block 7 is gone");
  status.SetPayload("other", absl::Cord("payload"));
  const absl::Status wrapped = WithContext(status, "layer 3");
  EXPECT_EQ(wrapped.code(), StatusCode::kNotFound);
  EXPECT_EQ(wrapped.message(), "layer 3: block 7 is gone");
  EXPECT_EQ(ReasonOf(wrapped), "BLOCK_NOT_FOUND");
  EXPECT_EQ(wrapped.GetPayload("other"), absl::Cord("payload"));
  EXPECT_TRUE(WithContext(absl::OkStatus(), "layer 3").ok());
}

TEST(StatusDeathTest, RefusesOkAndBadReasons) {
  EXPECT_DEATH(MakeError(StatusCode::kOk, "FINE", "no error"), "other than OK");
  EXPECT_DEATH(MakeError(StatusCode::kInternal, "", "nameless"), "1 to 63 bytes");
  EXPECT_DEATH(MakeError(StatusCode::kInternal, std::string(64, 'A'), "long"), "1 to 63 bytes");
}

absl::StatusOr<std::unique_ptr<int>> Half(int value) {
  if (value % 2 != 0) return MakeError(StatusCode::kInvalidArgument, "ODD", "odd");
  return std::make_unique<int>(value / 2);
}

absl::Status Quarter(int value, int* result, int* steps) {
  CERTKV_ASSIGN_OR_RETURN(const std::unique_ptr<int> half, Half(value));
  ++*steps;
  CERTKV_ASSIGN_OR_RETURN(std::unique_ptr<int> quarter, Half(*half));
  ++*steps;
  CERTKV_RETURN_IF_ERROR(Half(*quarter * 2).status());
  *result = *quarter;
  return absl::OkStatus();
}

TEST(StatusTest, MacrosReturnTheFirstErrorAndEvaluateOnce) {
  int result = 0;
  int steps = 0;
  EXPECT_TRUE(Quarter(12, &result, &steps).ok());
  EXPECT_EQ(result, 3);
  EXPECT_EQ(steps, 2);
  EXPECT_EQ(ReasonOf(Quarter(6, &result, &steps)), "ODD");
  EXPECT_EQ(steps, 3);
}

TEST(CheckDeathTest, FailedCheckNamesPlaceConditionAndRule) {
  const int count = 3;
  CERTKV_CHECK(count == 3, "three");
  EXPECT_DEATH(CERTKV_CHECK(count == 4, "there are four"),
               "kernels/core/status_test.cc:[0-9]+: check failed: count == 4: there are four");
}

}  // namespace
}  // namespace certkv
