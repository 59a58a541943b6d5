"""Signing in: a token becomes a cookie, because images and event streams of a browser carry no other header."""

from importlib.metadata import version
from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Request, Response

from cua_rl.monitor.run_routes import REFUSALS
from cua_rl.monitor.schemas import Session, SignIn
from cua_rl.monitor.security import COOKIE, AccessRules, GivenToken, rules_of

router = APIRouter(prefix="/api/session", tags=["session"], responses=REFUSALS)
_MAX_AGE_S = 30 * 24 * 3600
Rules = Annotated[AccessRules, Depends(rules_of)]


@router.get("")
async def get_session(rules: Rules, token: GivenToken) -> Session:
    """What the asker may do; needs no token."""
    return Session(
        can_read=rules.may_read(token),
        can_write=rules.may_write(token),
        must_sign_in=not rules.may_read(None),
        version=version("cua_rl"),
    )


@router.post("")
async def sign_in(rules: Rules, sign_in: SignIn, request: Request, response: Response) -> Session:
    """Keep a read or write token in a cookie that scripts cannot see."""
    if not (rules.may_write(sign_in.token) or (rules.read_token and rules.may_read(sign_in.token))):
        raise HTTPException(401, "expected the monitor's read or write token, got another one; it prints them at start")
    response.set_cookie(
        COOKIE,
        sign_in.token,
        max_age=_MAX_AGE_S,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return await get_session(rules, sign_in.token)


@router.delete("")
async def sign_out(rules: Rules, response: Response) -> Session:
    """Forget the cookie."""
    response.delete_cookie(COOKIE)
    return await get_session(rules, None)
